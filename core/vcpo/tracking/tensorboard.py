"""TensorBoard: event files in a folder, written by tensorboardX."""

from __future__ import annotations

import json
from pathlib import Path

from vcpo.records.journal import EvaluationRecord, EventRecord
from vcpo.records.step_record import StepRecord
from vcpo.spec.tracking import Sink as SinkSettings
from vcpo.tracking.scalars import evaluation_scalars, step_scalars
from vcpo.tracking.sink import TrackedRun

_COPY = ".copy"
"""End of the names of files that a copy replaces."""


class TensorBoardSink:
    """Appends to the run's folder.

    After a restart from a checkpoint TensorBoard shows the new steps only: the new file says that
    what earlier files hold from its first step on is void (`purge_step`). A copy replaces the files
    of the copy before.
    """

    def __init__(self, settings: SinkSettings, tracked: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        folder = Path(settings.directory) if settings.directory else tracked.run_dir / "tensorboard"
        if tracked.is_copy:
            for earlier in folder.glob(f"events.out.tfevents.*{_COPY}"):
                earlier.unlink()
        self._writer = SummaryWriter(
            str(folder),
            purge_step=tracked.first_step if tracked.furthest_step else None,
            # Names end in the second of their creation, which two starts may share.
            filename_suffix=f".{tracked.first_step:08d}{_COPY if tracked.is_copy else ''}",
        )
        text = json.dumps(tracked.settings, indent=2)
        self._writer.add_text("run", f"```json\n{text}\n```", tracked.first_step - 1)

    def step(self, record: StepRecord) -> None:
        """Write one point for each number."""
        for name, value in step_scalars(record).items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time_unix_s)
        self._writer.flush()  # a killed learner must not leave a gap before its checkpoint

    def evaluation(self, record: EvaluationRecord) -> None:
        """Write the result at the step at which the evaluation started."""
        for name, value in evaluation_scalars(record).items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time_unix_s)

    def event(self, record: EventRecord, step: int) -> None:
        """Write the event as text."""
        name = f"events/{record.kind}"
        self._writer.add_text(name, record.message, step, walltime=record.time_unix_s)

    def close(self, *, failed: bool) -> None:
        """Write what is left."""
        self._writer.close()
