"""TensorBoard: event files in a folder, written by tensorboardX."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Final

from vcpo.api.tracking import Sink as SinkSettings
from vcpo.api.tracking import SinkName
from vcpo.records.journal import EvaluationRecord, EventRecord
from vcpo.records.step_record import StepRecord
from vcpo.tracking.scalars import evaluation_scalars, step_scalars
from vcpo.tracking.sink import TITLE, TrackedRun, table_page, table_rows

_COPY = ".copy"
"""End of the names of files that a copy replaces."""
_FILES: Final = "events.out.tfevents.*"


class TensorBoardSink:
    """Appends to the run's folder.

    Where a step comes again, or comes late, TensorBoard shows the new steps only: a mark says that
    what the files hold from this step on is void. A copy replaces the files of the copy before.
    """

    def __init__(self, settings: SinkSettings, tracked: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        folder = Path(settings.directory) if settings.directory else tracked.run_dir / "tensorboard"
        if tracked.is_copy:
            for earlier in folder.glob(f"{_FILES}{_COPY}"):
                earlier.unlink()
        files = sorted(folder.glob(_FILES))
        self._settings, self._tracked = settings, tracked
        self._last_step = 0 if tracked.is_copy else int(tracked.known(SinkName.TENSORBOARD) or 0)
        # Names end in the second of their creation, which two starts may share.
        suffix = f".{len(files):08d}{_COPY if tracked.is_copy else ''}"
        # What a process that died has written of a step after the last one is void.
        purge_step = self._last_step + 1 if files and not tracked.is_copy else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=suffix)
        text = json.dumps(tracked.settings, indent=2)
        self._writer.add_text("run", f"```json\n{text}\n```", self._last_step)

    def sent_steps(self) -> Collection[int]:
        return range(1, self._last_step + 1)

    def step(self, record: StepRecord) -> None:
        if record.step <= self._last_step:
            self._void_from(record.step)
        self._last_step = record.step
        for name, value in step_scalars(record).items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time_unix_s)
        self._writer.flush()
        if not self._tracked.is_copy:
            self._tracked.keep(SinkName.TENSORBOARD, str(record.step))

    def evaluation(self, record: EvaluationRecord) -> None:
        for name, value in evaluation_scalars(record).items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time_unix_s)
        if rows := table_rows(self._settings, self._tracked, record.step):
            page = table_page(rows)
            self._writer.add_text(TITLE, page, record.step, walltime=record.time_unix_s)

    def event(self, record: EventRecord, step: int) -> None:
        name = f"events/{record.kind}"
        self._writer.add_text(name, record.message, step, walltime=record.time_unix_s)

    def close(self, *, failed: bool) -> None:
        self._writer.close()

    def _void_from(self, step: int) -> None:
        """Say that what was written from a step on does not count."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._writer.file_writer.add_event(Event(step=step, session_log=start))
