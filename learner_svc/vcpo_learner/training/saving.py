"""Writes checkpoints beside the steps and the model at the end, and handles a full disk.

A step waits only until the tensors are copied. Files are written in threads while training goes on,
one checkpoint at a time: the next one waits for it.

If the disk is full between two steps, training continues without the checkpoint. The learner
reports this once and tries again between later steps. At the end the learner waits for free space,
up to `checkpoint.fullDiskWaitSeconds`, because it would lose the trained model otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vcpo.api import VCPORun
from vcpo.metrics.label_values import Stage
from vcpo.records.exported_model import ExportedModel
from vcpo.service.lifecycle import StartError
from vcpo.wire.phase import RunPhase
from vcpo_learner.checkpoints.disk import (
    DiskFullError,
    SpaceNeed,
    best_evaluated_step,
    folder_bytes,
    lacks_one_checkpoint,
    space_warning,
)
from vcpo_learner.checkpoints.folder import TENSORS, CheckpointFolder, state_bytes
from vcpo_learner.checkpoints.manifest import FileChecksum
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.contents import LedgerState
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.model.model_folder import ModelExport
from vcpo_learner.redo_log.log import RedoLog
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.run_records import RunRecords
from vcpo_learner.training.tensor_thread import TensorThread, TensorWork
from vcpo_learner.update.policy_update import PolicyUpdate

RETRY_S = 15.0
"""Time between two attempts on a full disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagedCheckpoint:
    """A checkpoint of one moment, copied and on its way to the disk."""

    step: int
    folder: Path
    closing: ExitStack
    """Gives the folder its name, or removes it after an error."""
    tensors: Future[dict[str, FileChecksum]]
    update_state: bytes
    ledger: LedgerState
    healthy: bool


class RunSaver:
    """Writes the files of one run. Owner: the event loop.

    The tensor thread copies; a thread of its own writes.
    """

    def __init__(
        self,
        run: VCPORun,
        run_dir: Path,
        export: ModelExport,
        *,
        update: PolicyUpdate,
        dispatcher: Dispatcher,
        log: RedoLog,
        tensor_thread: TensorThread,
        gauges: LearnerGauges,
        records: RunRecords,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        """sleep: waits a number of seconds of `clock`."""
        self.checkpoints = CheckpointFolder(run_dir / "checkpoints", run)
        self.saved_step = -1
        """Step of the newest checkpoint on disk; -1 without one."""
        self._spec = run.spec
        self._run_dir = run_dir
        self._export = export
        self._update = update
        self._dispatcher = dispatcher
        self._log = log
        self._tensor_thread = tensor_thread
        self._gauges = gauges
        self._records = records
        self._clock = clock
        self._sleep = sleep
        self._file_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="files")
        self._settings = run.spec.checkpoint
        self._writing: asyncio.Task[None] | None = None
        """The checkpoint on its way to the disk, until it was awaited."""
        self._is_full_since_s: float | None = None
        self._tried_s = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all steps were taken in an earlier process and the model is on disk."""
        model = ExportedModel.read(self._run_dir / "model")
        steps = self._spec.steps
        return model is not None and min(model.step, self._step) >= steps

    @property
    def _checkpoint_bytes(self) -> int:
        return self._export.num_trained * self._spec.optimizer.checkpoint_bytes_per_parameter

    def check_space(self) -> None:
        """Compare the free space with what the run will write; report what is missing.

        Raises:
            StartError: if not even one checkpoint fits.
        """
        run_dir = self._run_dir
        need = SpaceNeed(
            checkpoint_bytes=self._checkpoint_bytes,
            num_checkpoints=self._spec.most_checkpoints,
            model_bytes=self._export.model_bytes,
        )
        free_bytes = shutil.disk_usage(run_dir).free
        held_bytes = folder_bytes(run_dir / "checkpoints")
        warning = space_warning(need, free_bytes=free_bytes, held_bytes=held_bytes)
        if warning is None:
            return
        if lacks_one_checkpoint(need, free_bytes=free_bytes):
            raise StartError(f"{run_dir}: no room for a checkpoint: {warning}")
        self._records.event("DiskSpaceLow", f"{run_dir}: {warning}")

    def resume_at(self, step: int) -> None:
        """Record that there is a checkpoint of `step`."""
        self.saved_step = step

    async def save_if_due(self, *, is_wanted: bool = False) -> None:
        """Begin a checkpoint if one is due, or if the disk was full and it is time to retry.

        A redo log that has grown makes one due, because only a checkpoint lets it go of changes.

        is_wanted: whether one is due at this step for another reason than its number.
        """
        is_grown = self._log.is_checkpoint_due and self._writing is None
        is_due = is_wanted or is_grown or self._step % self._settings.every_steps == 0
        with contextlib.suppress(DiskFullError):
            if is_due or (self._writing is not None and self._writing.done()):
                await self.join()
            if self._is_full_since_s is not None:
                is_due = self._clock() - self._tried_s >= RETRY_S
            if is_due:
                await self._begin()

    async def save_if_overdue(self, *, is_wanted: bool = False) -> None:
        """Begin a checkpoint if one was due while steps were redone; as `save_if_due`."""
        every_steps = self._settings.every_steps
        if is_wanted or self._step // every_steps > max(self.saved_step, 0) // every_steps:
            with contextlib.suppress(DiskFullError):
                await self._begin()

    async def save(self) -> None:
        """Write a checkpoint, unless there is one of this step, and wait until it is on the disk.

        Raises:
            DiskFullError: if the disk has no room for it.
        """
        with contextlib.suppress(DiskFullError):  # of an earlier step
            await self.join()
        await self._begin()
        await self.join()

    async def join(self) -> None:
        """Wait for the checkpoint on its way to the disk.

        Raises:
            DiskFullError: if the disk has no room for it.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            with self._gauges.stage(Stage.CHECKPOINT):
                await writing

    async def finish(self, drain_s: float) -> None:
        """Write the last checkpoint, and the model unless the run was asked to stop.

        drain_s: how long a run that was asked to stop waits for free space.

        Raises:
            StartError: if there was no room in time, naming the file.
        """
        await self._save_with_retries(self.save, drain_s)
        if self._dispatcher.phase is not RunPhase.RUNNING:
            return
        if self._export.has_adapters:
            await self._save_with_retries(self._save_adapters, drain_s)
        await self._save_with_retries(self._save_model, drain_s)

    async def _begin(self) -> None:
        """Copy the state between two steps, and begin to write it; none other may be on its way."""
        step, ledger_now = self._step, self._dispatcher.ledger
        # While steps are redone the ledger is ahead of the parameters; the log has what is missing.
        is_ahead = ledger_now.counts().consumed > step * self._spec.batch.trajectories
        if step == self.saved_step or is_ahead:
            return
        # The snapshot is taken here, because the ledger belongs to the event loop.
        ledger = ledger_now.snapshot()
        self._tried_s = self._clock()
        with self._reports_disk(), self._gauges.stage(Stage.CHECKPOINT):
            staged = await self._tensor_thread.run(
                TensorWork.CHECKPOINT, lambda: self._stage(step, ledger)
            )
        loop = asyncio.get_running_loop()
        # Submitted here: a task that never runs, because the loop ends, must not lose it.
        written = loop.run_in_executor(self._file_thread, lambda: self._complete(staged))
        self._writing = asyncio.create_task(self._record(staged, written))

    def _stage(self, step: int, ledger: LedgerState) -> _StagedCheckpoint:
        update = self._update
        with ExitStack() as closing:
            folder = closing.enter_context(
                self.checkpoints.writing(step, needed_bytes=update.checkpoint_bytes)
            )
            return _StagedCheckpoint(
                step=step,
                folder=folder,
                tensors=update.save_tensors(folder=folder / TENSORS),
                update_state=state_bytes(update.state_dict()),
                ledger=ledger,
                healthy=update.health.is_good,
                closing=closing.pop_all(),
            )

    def _complete(self, staged: _StagedCheckpoint) -> set[int]:
        """Wait for the tensors, write the rest, rename the folder and remove old ones.

        Returns the steps of the checkpoints from which a learner may resume.
        """
        with staged.closing:
            self.checkpoints.complete(
                staged.folder,
                step=staged.step,
                tensors=staged.tensors.result(),
                update_state=staged.update_state,
                ledger=staged.ledger.parts(),
                healthy=staged.healthy,
            )
        best = None
        if self._settings.keep_best:
            best = best_evaluated_step(staged.ledger.head.accuracies, self.checkpoints.steps())
        return self.checkpoints.remove_old(staged.step, best)

    async def _record(self, staged: _StagedCheckpoint, written: Awaitable[set[int]]) -> None:
        """Wait until a checkpoint is on the disk, and record it."""
        with self._reports_disk():
            kept = await written
        self._report_room()
        step, log = staged.step, self._log
        self.saved_step = step
        log.add_checkpoint(step, staged.ledger.head.log_position, kept_steps=kept)
        self._gauges.record_checkpoint(
            time.time(),
            size_bytes=self._checkpoint_bytes,
            free_bytes=shutil.disk_usage(self._run_dir).free,
        )
        self._records.event("CheckpointSaved", f"step {step}")

    async def _save_adapters(self) -> None:
        folder, step = self._run_dir / "adapters", self._step
        tensors = self.checkpoints.tensors(step)
        await self._write(lambda: self._export.write_adapters(folder, tensors, step=step))

    async def _save_model(self) -> None:
        folder, step = self._run_dir / "model", self._step
        tensors = self.checkpoints.tensors(step)
        await self._write(lambda: self._export.write_model(folder, tensors, step=step))

    @property
    def _step(self) -> int:
        return self._dispatcher.policy_version

    async def _write(self, write: Callable[[], object]) -> None:
        """Call `write` in the file thread."""
        self._tried_s = self._clock()
        with self._reports_disk(), self._gauges.stage(Stage.CHECKPOINT):
            await asyncio.get_running_loop().run_in_executor(self._file_thread, write)
        self._report_room()

    @contextlib.contextmanager
    def _reports_disk(self) -> Iterator[None]:
        """Report if the disk becomes full in the block, or has room again."""
        try:
            yield
        except DiskFullError as error:
            self._gauges.count_disk_full()
            if self._is_full_since_s is None:
                self._is_full_since_s = self._tried_s
                self._records.event(
                    "DiskFull", f"{error}; the next attempts follow every {RETRY_S:g} s"
                )
            raise

    def _report_room(self) -> None:
        if self._is_full_since_s is not None:
            self._is_full_since_s = None
            self._records.event("DiskHasRoom", f"{self._run_dir}: the files are written")

    async def _save_with_retries(self, save: Callable[[], Awaitable[None]], drain_s: float) -> None:
        """Call `save` until the disk has room or the time is up.

        Raises:
            StartError: if the time is up.
        """
        started_s = self._clock()
        while True:
            try:
                return await save()
            except DiskFullError as error:
                is_running = self._dispatcher.phase is RunPhase.RUNNING
                limit_s = self._settings.full_disk_wait_seconds if is_running else drain_s
                if self._clock() - started_s >= limit_s:
                    newest = f"step {self.saved_step}" if self.saved_step >= 0 else "there is none"
                    raise StartError(
                        f"{error}; gave up after {limit_s:g} s at step {self._step}. Free disk"
                        f" space and resume from the newest checkpoint ({newest});"
                        " spec.checkpoint.fullDiskWaitSeconds sets how long the learner waits"
                    ) from error
            await self._sleep(min(RETRY_S, limit_s))
