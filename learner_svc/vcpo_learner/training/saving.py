"""Saving beside training: checkpoints now and then, the model at the end, on a full disk too.

While there are steps to take, a checkpoint that finds no room costs nothing but safety: it is told
of once, and tried again between later steps. At the end there is nothing else to do: the learner
waits for room, up to `checkpoint.fullDiskWaitSeconds`, rather than give away what was learned.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from vcpo.records.exported_model import ExportedModel
from vcpo.service.lifecycle import StartError
from vcpo.wire.phase import RunPhase
from vcpo_learner.model.checkpoint import Checkpoint, CheckpointFolder
from vcpo_learner.model.disk import DiskFullError
from vcpo_learner.model.loading import policy_tensors
from vcpo_learner.model.model_folder import ModelExport
from vcpo_learner.training.parts import TrainingParts

RETRY_S = 15.0
"""From an attempt that found no room to the next."""


class Saving:
    """What one learner leaves on disk. Owner: its event loop; files are written in the thread."""

    def __init__(self, parts: TrainingParts, tensor_thread: ThreadPoolExecutor) -> None:
        self.checkpoints = CheckpointFolder(parts.run_dir / "checkpoints", parts.run)
        self.saved_step = -1
        """Step of the newest checkpoint known to be on disk."""
        self._parts = parts
        self._thread = tensor_thread
        self._settings = parts.run.spec.checkpoint
        self._export = ModelExport(parts.run, parts.model, parts.tokenizer)
        self._is_full_since_s: float | None = None
        self._tried_s = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether the run has taken all of its steps before, and its model is on disk."""
        model = ExportedModel.read(self._parts.run_dir / "model")
        steps = self._parts.run.spec.steps
        return model is not None and min(model.step, self._step) >= steps

    async def save_if_due(self) -> None:
        """Write a checkpoint when the step says so, or when one is owed and it is time to retry."""
        is_owed = self._is_full_since_s is not None
        may_retry = self._parts.clock() - self._tried_s >= RETRY_S
        if may_retry if is_owed else self._step % self._settings.every_steps == 0:
            with contextlib.suppress(DiskFullError):
                await self.save()

    async def save(self) -> None:
        """Write a checkpoint, unless that of this step is there.

        Raises:
            DiskFullError: when there is no room for it.
        """
        step = self._step
        if step == self.saved_step:
            return
        # The ledger's snapshot is taken here, on its own loop; only files wait in the thread.
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
        self.saved_step = step
        self._parts.gauges.checkpoint(time.time())
        self._parts.event("CheckpointSaved", f"step {step}")

    async def finish(self, drain_s: float) -> None:
        """Write the last checkpoint, and the model when the run has not been asked to stop.

        drain_s: how long a run that was asked to stop waits for room.

        Raises:
            StartError: when there was no room in time; says for what.
        """
        await self._until_written(self.save, drain_s)
        if self._parts.dispatcher.phase is not RunPhase.RUNNING:
            return
        run_dir, step = self._parts.run_dir, self._step
        if self._export.has_adapters:
            await self._until_written(
                lambda: self._write(
                    lambda: self._export.write_adapters(run_dir / "adapters", step=step)
                ),
                drain_s,
            )
        await self._until_written(
            lambda: self._write(lambda: self._export.write_model(run_dir / "model", step=step)),
            drain_s,
        )

    @property
    def _step(self) -> int:
        return self._parts.dispatcher.policy_version

    async def _write(self, write: Callable[[], object]) -> None:
        """Write something in the thread, and tell when the disk fills up or has room again."""
        now_s = self._tried_s = self._parts.clock()
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, write)
        except DiskFullError as error:
            self._parts.gauges.disk_full()
            if self._is_full_since_s is None:
                self._is_full_since_s = now_s
                self._parts.event("DiskFull", f"{error}; tried again every {RETRY_S:g} s")
            raise
        if self._is_full_since_s is not None:
            self._is_full_since_s = None
            self._parts.event("DiskHasRoom", f"{self._parts.run_dir}: written at last")

    async def _until_written(self, write: Callable[[], Awaitable[None]], drain_s: float) -> None:
        """Repeat what finds no room, until it does or the time is up.

        Raises:
            StartError: when the time is up.
        """
        begun_s = self._parts.clock()
        while True:
            try:
                return await write()
            except DiskFullError as error:
                is_running = self._parts.dispatcher.phase is RunPhase.RUNNING
                limit_s = self._settings.full_disk_wait_seconds if is_running else drain_s
                if self._parts.clock() - begun_s >= limit_s:
                    there_is = f"that of step {self.saved_step}" if self.saved_step >= 0 else "none"
                    raise StartError(
                        f"{error}; gave up after {limit_s:g} s at step {self._step}. Make room and"
                        f" resume from the newest checkpoint ({there_is});"
                        " spec.checkpoint.fullDiskWaitSeconds waits longer"
                    ) from error
            await self._parts.sleep(min(RETRY_S, limit_s))
