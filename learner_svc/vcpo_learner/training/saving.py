"""Writes checkpoints between steps and the model at the end, and handles a full disk.

If the disk is full between two steps, training continues without the checkpoint. The learner
reports this once and tries again between later steps. At the end the learner waits for free space,
up to `checkpoint.fullDiskWaitSeconds`, because it would lose the trained model otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from vcpo.metrics.label_values import Stage
from vcpo.records.exported_model import ExportedModel
from vcpo.service.lifecycle import StartError
from vcpo.wire.phase import RunPhase
from vcpo_learner.model.checkpoint import Checkpoint, CheckpointFolder
from vcpo_learner.model.disk import DiskFullError
from vcpo_learner.model.loading import policy_tensors
from vcpo_learner.model.model_folder import ModelExport
from vcpo_learner.training.parts import TrainingParts

RETRY_S = 15.0
"""Time between two attempts on a full disk."""


class RunSaver:
    """Writes the files of one run. Owner: the event loop; the tensor thread writes the files."""

    def __init__(self, parts: TrainingParts, tensor_thread: ThreadPoolExecutor) -> None:
        self.checkpoints = CheckpointFolder(parts.run_dir / "checkpoints", parts.run)
        self._saved_step = -1
        """Step of the newest checkpoint on disk, -1 if none is known."""
        self._parts = parts
        self._thread = tensor_thread
        self._settings = parts.run.spec.checkpoint
        self._export = ModelExport(parts.run, parts.model, parts.tokenizer)
        self._is_full_since_s: float | None = None
        self._tried_s = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all steps were taken in an earlier process and the model is on disk."""
        model = ExportedModel.read(self._parts.run_dir / "model")
        steps = self._parts.run.spec.steps
        return model is not None and min(model.step, self._step) >= steps

    def resume_at(self, step: int) -> None:
        """Record that there is a checkpoint of `step`."""
        self._saved_step = step

    async def save_if_due(self) -> None:
        """Write a checkpoint if one is due, or if the disk was full and it is time to retry."""
        must_retry = self._is_full_since_s is not None
        may_retry = self._parts.clock() - self._tried_s >= RETRY_S
        if may_retry if must_retry else self._step % self._settings.every_steps == 0:
            with contextlib.suppress(DiskFullError):
                await self.save()

    async def save(self) -> None:
        """Write a checkpoint, unless there is one of this step.

        Raises:
            DiskFullError: if the disk has no room for it.
        """
        step = self._step
        if step == self._saved_step:
            return
        # The snapshot is taken here, because the ledger belongs to the event loop.
        ledger = self._parts.dispatcher.ledger.snapshot()
        model, update = self._parts.model, self._parts.update
        await self._write(
            lambda: self.checkpoints.save(
                Checkpoint(
                    step=step,
                    parameters=policy_tensors(model),
                    update_state=update.state_dict(),
                    ledger=ledger,
                )
            )
        )
        self._saved_step = step
        self._parts.gauges.record_checkpoint(time.time())
        self._parts.event("CheckpointSaved", f"step {step}")

    async def finish(self, drain_s: float) -> None:
        """Write the last checkpoint, and the model unless the run was asked to stop.

        drain_s: how long a run that was asked to stop waits for free space.

        Raises:
            StartError: if there was no room in time, naming the file.
        """
        await self._save_with_retries(self.save, drain_s)
        if self._parts.dispatcher.phase is not RunPhase.RUNNING:
            return
        if self._export.has_adapters:
            await self._save_with_retries(self._save_adapters, drain_s)
        await self._save_with_retries(self._save_model, drain_s)

    async def _save_adapters(self) -> None:
        folder, step = self._parts.run_dir / "adapters", self._step
        await self._write(lambda: self._export.write_adapters(folder, step=step))

    async def _save_model(self) -> None:
        folder, step = self._parts.run_dir / "model", self._step
        await self._write(lambda: self._export.write_model(folder, step=step))

    @property
    def _step(self) -> int:
        return self._parts.dispatcher.policy_version

    async def _write(self, write: Callable[[], object]) -> None:
        """Call `write` in the thread; report if the disk becomes full or has room again."""
        now_s = self._tried_s = self._parts.clock()
        try:
            with self._parts.stage(Stage.CHECKPOINT):
                await asyncio.get_running_loop().run_in_executor(self._thread, write)
        except DiskFullError as error:
            self._parts.gauges.count_disk_full()
            if self._is_full_since_s is None:
                self._is_full_since_s = now_s
                self._parts.event(
                    "DiskFull", f"{error}; the next attempts follow every {RETRY_S:g} s"
                )
            raise
        if self._is_full_since_s is not None:
            self._is_full_since_s = None
            self._parts.event("DiskHasRoom", f"{self._parts.run_dir}: the files are written")

    async def _save_with_retries(self, save: Callable[[], Awaitable[None]], drain_s: float) -> None:
        """Call `save` until the disk has room or the time is up.

        Raises:
            StartError: if the time is up.
        """
        started_s = self._parts.clock()
        while True:
            try:
                return await save()
            except DiskFullError as error:
                is_running = self._parts.dispatcher.phase is RunPhase.RUNNING
                limit_s = self._settings.full_disk_wait_seconds if is_running else drain_s
                if self._parts.clock() - started_s >= limit_s:
                    newest = (
                        f"step {self._saved_step}" if self._saved_step >= 0 else "there is none"
                    )
                    raise StartError(
                        f"{error}; gave up after {limit_s:g} s at step {self._step}. Free disk"
                        f" space and resume from the newest checkpoint ({newest});"
                        " spec.checkpoint.fullDiskWaitSeconds sets how long the learner waits"
                    ) from error
            await self._parts.sleep(min(RETRY_S, limit_s))
