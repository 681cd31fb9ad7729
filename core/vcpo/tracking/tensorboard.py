"""TensorBoard: event files in a folder, written by tensorboardX."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vcpo.api.tracking import Sink as SinkSettings
from vcpo.records.journal import EvaluationRecord, EventRecord
from vcpo.records.step_record import StepRecord
from vcpo.tracking.sample_table import TITLE, table_page, table_rows
from vcpo.tracking.scalars import LAST_NAME, evaluation_scalars, step_scalars
from vcpo.tracking.sink import TrackedRun

if TYPE_CHECKING:
    from tensorboardX.proto.event_pb2 import Event

_COPY = ".copy"
"""End of the names of files that a copy replaces."""
_FILES: Final = "events.out.tfevents.*"
_HEAD: Final = struct.Struct("<QI")
"""Bytes before an event: the event's size, and a checksum of the size."""
_TAIL_BYTES: Final = 4
"""Number of bytes after an event, its checksum."""


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
        self._sent_steps = () if tracked.is_copy else _unbroken(_shown_steps(files))
        self._last_step = len(self._sent_steps)
        # Names end in the second of their creation, which two starts may share.
        suffix = f".{len(files):08d}{_COPY if tracked.is_copy else ''}"
        # The mark also voids what the files hold after a gap.
        purge_step = self._last_step + 1 if files and not tracked.is_copy else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, filename_suffix=suffix)
        text = json.dumps(tracked.settings, indent=2)
        self._writer.add_text("run", f"```json\n{text}\n```", self._last_step)

    def sent_steps(self) -> Collection[int]:
        """Return the steps from 1 to the first that the files do not show whole."""
        return self._sent_steps

    def step(self, record: StepRecord) -> None:
        """Write one point for each number."""
        if record.step <= self._last_step:
            self._void_from(record.step)
        self._last_step = record.step
        for name, value in step_scalars(record).items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time_unix_s)
        self._writer.flush()

    def evaluation(self, record: EvaluationRecord) -> None:
        """Write the result at the step at which the evaluation started."""
        for name, value in evaluation_scalars(record).items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time_unix_s)
        if rows := table_rows(self._settings, self._tracked, record.step):
            page = table_page(rows)
            self._writer.add_text(TITLE, page, record.step, walltime=record.time_unix_s)

    def event(self, record: EventRecord, step: int) -> None:
        """Write the event as text."""
        name = f"events/{record.kind}"
        self._writer.add_text(name, record.message, step, walltime=record.time_unix_s)

    def close(self, *, failed: bool) -> None:
        """Write what is left."""
        self._writer.close()

    def _void_from(self, step: int) -> None:
        """Say that what was written from a step on does not count."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._writer.file_writer.add_event(Event(step=step, session_log=start))


def _shown_steps(files: Collection[Path]) -> set[int]:
    """Return the steps that TensorBoard shows whole, from files in their order."""
    from tensorboardX.proto.event_pb2 import SessionLog

    steps: set[int] = set()
    for file in files:
        for event in _events(file):
            if event.session_log.status == SessionLog.START:
                steps = {step for step in steps if step < event.step}
            steps |= {event.step for value in event.summary.value if value.tag == LAST_NAME}
    return steps


def _unbroken(steps: Collection[int]) -> range:
    """Return the steps from 1 to the first that is missing."""
    last = 0
    while last + 1 in steps:
        last += 1
    return range(1, last + 1)


def _events(file: Path) -> Iterator[Event]:
    """Yield the events of a file, up to the first that is cut off or damaged."""
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event

    left_bytes = file.stat().st_size
    with file.open("rb") as written:
        while left_bytes >= _HEAD.size:
            size_bytes, _ = _HEAD.unpack(written.read(_HEAD.size))
            left_bytes -= _HEAD.size + size_bytes + _TAIL_BYTES
            if left_bytes < 0:
                return
            try:
                yield Event.FromString(written.read(size_bytes))
            except DecodeError:
                return
            written.seek(_TAIL_BYTES, 1)
