"""Writes checkpoints beside the steps and the model at the end.

A step waits only until the tensors are copied. Files are written in threads while training goes on,
one checkpoint at a time: the next one waits for it. If the disk does not take one, training
continues without it, and the next checkpoint tries again.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from vcpo.api import VCPORun
from vcpo.metrics.label_values import Stage
from vcpo.records.exported_model import ExportedModel
from vcpo.service.lifecycle import StartError
from vcpo.wire.phase import RunPhase
from vcpo_learner.checkpoints.folder import (
    TENSORS,
    CheckpointFolder,
    best_evaluated_step,
    state_bytes,
)
from vcpo_learner.checkpoints.manifest import FileChecksum, WriteError
from vcpo_learner.event_loop import TensorThread
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.ledger.ledger import LedgerState
from vcpo_learner.ledger.redo_log import RedoLog
from vcpo_learner.model.model_folder import ModelExport
from vcpo_learner.telemetry.gauges import LearnerGauges
from vcpo_learner.telemetry.step_log import RunRecords
from vcpo_learner.troubles import Trouble, Troubles
from vcpo_learner.update.policy_update import PolicyUpdate


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


@dataclass(slots=True, kw_only=True, eq=False)
class RunSaver:
    """Writes the files of one run. Owner: the event loop.

    The tensor thread copies; a thread of its own writes.
    """

    run: VCPORun
    run_dir: Path
    export: ModelExport
    update: PolicyUpdate
    dispatcher: Dispatcher
    log: RedoLog
    thread: TensorThread
    gauges: LearnerGauges
    records: RunRecords
    troubles: Troubles
    checkpoints: CheckpointFolder = field(init=False)
    saved_step: int = -1
    """Step of the newest checkpoint on disk; -1 without one."""
    _file_thread: ThreadPoolExecutor = field(init=False)
    _writing: asyncio.Task[None] | None = None
    """The checkpoint on its way to the disk, until it was awaited."""
    _failure: WriteError | None = None
    """Why the newest checkpoint is not on the disk."""

    def __post_init__(self) -> None:
        self.checkpoints = CheckpointFolder(self.run_dir / "checkpoints", self.run)
        self._file_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="files")

    @property
    def is_complete(self) -> bool:
        model = ExportedModel.read(self.run_dir / "model")
        return model is not None and min(model.step, self._step) >= self.run.spec.steps

    async def save_if_due(self, *, is_wanted: bool = False) -> None:
        """Begin a checkpoint if one is due.

        A redo log that has grown makes one due, because only a checkpoint lets it go of changes.

        is_wanted: whether one is due at this step for another reason than its number.
        """
        is_grown = self.log.is_checkpoint_due and self._writing is None
        is_due = is_wanted or is_grown or self._step % self.run.spec.checkpoint.every_steps == 0
        if is_due or (self._writing is not None and self._writing.done()):
            await self.join()
        if is_due:
            await self._begin()

    async def save(self) -> None:
        """Write a checkpoint, unless there is one of this step, and wait for it."""
        await self.join()
        await self._begin()
        await self.join()

    async def join(self) -> None:
        """Wait for the checkpoint on its way to the disk."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            with self.gauges.stage(Stage.CHECKPOINT):
                await writing

    async def finish(self) -> None:
        """Write the last checkpoint, and the model unless the run was asked to stop."""
        await self.save()
        if self._failure is not None:
            raise self._end_error() from self._failure
        if self.dispatcher.phase is not RunPhase.RUNNING:
            return
        tensors = self.checkpoints.path(self._step) / TENSORS
        try:
            if self.export.has_adapters:
                await self._write_last(self.export.write_adapters, "adapters", tensors)
            await self._write_last(self.export.write_model, "model", tensors)
        except WriteError as error:
            self._report(error)
            raise self._end_error() from error

    async def _begin(self) -> None:
        """Copy the state between two steps, and begin to write it; none other may be on its way."""
        step = self._step
        if step == self.saved_step:
            return
        # The snapshot is taken here, because the ledger belongs to the event loop.
        ledger = self.dispatcher.ledger.snapshot()
        self._failure = None
        try:
            with self.gauges.stage(Stage.CHECKPOINT):
                staged = await self.thread.run(lambda: self._stage(step, ledger))
        except WriteError as error:
            self._report(error)
            return
        loop = asyncio.get_running_loop()
        # Submitted here: a task that never runs, because the loop ends, must not lose it.
        written = loop.run_in_executor(self._file_thread, lambda: self._complete(staged))
        self._writing = asyncio.create_task(self._record(staged, written))

    def _stage(self, step: int, ledger: LedgerState) -> _StagedCheckpoint:
        update = self.update
        with ExitStack() as closing:
            folder = closing.enter_context(self.checkpoints.writing(step))
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
        best = best_evaluated_step(staged.ledger.head.accuracies, self.checkpoints.steps())
        return self.checkpoints.remove_old(staged.step, best)

    async def _record(self, staged: _StagedCheckpoint, written: Awaitable[set[int]]) -> None:
        """Wait until a checkpoint is on the disk, and record it, or that it cannot be written."""
        try:
            kept = await written
        except WriteError as error:
            self._report(error)
            return
        self.saved_step = staged.step
        self.log.remove_before(min(kept, default=staged.step))
        optimizer = self.run.spec.optimizer
        self.gauges.record_checkpoint(
            time.time(),
            size_bytes=self.export.num_trained * optimizer.checkpoint_bytes_per_parameter,
            free_bytes=shutil.disk_usage(self.run_dir).free,
        )
        self.records.event("CheckpointSaved", f"step {staged.step}")

    async def _write_last(self, write: Callable[..., None], name: str, tensors: Path) -> None:
        folder, step = self.run_dir / name, self._step
        with self.gauges.stage(Stage.CHECKPOINT):
            await asyncio.get_running_loop().run_in_executor(
                self._file_thread, lambda: write(folder, tensors, step=step)
            )

    def _report(self, error: WriteError) -> None:
        self._failure = error
        self.troubles.report(Trouble.WRITE, f"{error}; the next checkpoint tries again")

    def _end_error(self) -> StartError:
        newest = f"step {self.saved_step}" if self.saved_step >= 0 else "there is none"
        return StartError(
            f"{self._failure}. Free disk space and resume from the newest checkpoint ({newest})"
        )

    @property
    def _step(self) -> int:
        return self.dispatcher.step
