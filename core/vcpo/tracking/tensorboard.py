"""TensorBoard: event files in a folder, written by tensorboardX.

Its SummaryWriter would write in a thread, which a full disk ends: then its queue blocks for ever.
"""

import contextlib
import json
import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from vcpo.api.tracking import Sink as SinkSettings
from vcpo.api.tracking import SinkName
from vcpo.records.journal import EvaluationRecord, EventRecord, read_metrics
from vcpo.records.step_record import StepRecord
from vcpo.tracking.sink import (
    TITLE,
    TrackedRun,
    evaluation_scalars,
    step_scalars,
    table_page,
    table_rows,
)

_COPY = ".copy"
"""End of the names of files that a copy replaces."""
_FILES: Final = "events.out.tfevents.*"


class TensorBoardSink:
    """Appends to the run's folder.

    Where a step comes again, or comes late, TensorBoard shows the new steps only: a mark says that
    what the files hold from this step on is void. A copy replaces the files of the copy before.
    """

    def __init__(self, settings: SinkSettings, tracked: TrackedRun) -> None:
        from tensorboardX.record_writer import RecordWriter

        folder = Path(settings.directory) if settings.directory else tracked.run_dir / "tensorboard"
        if tracked.is_copy:
            for earlier in folder.glob(f"{_FILES}{_COPY}"):
                earlier.unlink()
        files = sorted(folder.glob(_FILES))
        self._settings, self._tracked = settings, tracked
        known = "" if tracked.is_copy else tracked.known(SinkName.TENSORBOARD) or ""
        step, _, self._last_time = known.partition(" ")
        self._last_step = int(step or 0)
        # Names end in the second of their creation, which two starts may share.
        suffix = f"{len(files):08d}{_COPY if tracked.is_copy else ''}"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{suffix}"
        self._writer = RecordWriter(str(folder / name))
        self._append(0, time.time(), {"file_version": "brain.Event:2"})
        if files and not tracked.is_copy:
            # What a process that died has written of a step after the last one is void.
            self._void_from(self._last_step + 1)
        text = json.dumps(tracked.settings, indent=2)
        self._text("run", f"```json\n{text}\n```", self._last_step, time.time())

    def sent_steps(self) -> Collection[int]:
        steps = {each.step: each for each in read_metrics(self._tracked.run_dir).steps}
        last = steps.get(self._last_step)
        if last is None or repr(last.time_unix_s) != self._last_time:
            return ()  # a restart has undone it, and nobody knows how many steps before it
        return range(1, self._last_step + 1)

    def step(self, record: StepRecord) -> None:
        if record.step <= self._last_step:
            self._void_from(record.step)
        self._last_step = record.step
        self._scalars(step_scalars(record), record.step, record.time_unix_s)
        if not self._tracked.is_copy:
            self._tracked.keep(SinkName.TENSORBOARD, f"{record.step} {record.time_unix_s!r}")

    def evaluation(self, record: EvaluationRecord) -> None:
        self._scalars(evaluation_scalars(record), record.step, record.time_unix_s)
        if rows := table_rows(self._settings, self._tracked, record.step):
            self._text(TITLE, table_page(rows), record.step, record.time_unix_s)

    def event(self, record: EventRecord, step: int) -> None:
        self._text(f"events/{record.kind}", record.message, step, record.time_unix_s)

    def close(self, *, failed: bool) -> None:
        self._writer.close()

    def _void_from(self, step: int) -> None:
        from tensorboardX.proto.event_pb2 import SessionLog

        start = SessionLog(status=SessionLog.START)
        self._append(step, time.time(), {"session_log": start})

    def _scalars(self, values: Mapping[str, float], step: int, time_unix_s: float) -> None:
        from tensorboardX.summary import scalar

        named = [{"summary": scalar(name, value)} for name, value in values.items()]
        self._append(step, time_unix_s, *named)

    def _text(self, name: str, text: str, step: int, time_unix_s: float) -> None:
        from tensorboardX import summary

        self._append(step, time_unix_s, {"summary": summary.text(name, text)})

    def _append(self, step: int, time_unix_s: float, *contents: Mapping[str, Any]) -> None:
        """Write events to the disk; after an error the file is closed, and the sink opened anew."""
        from tensorboardX.proto.event_pb2 import Event

        try:
            for content in contents:
                event = Event(step=step, wall_time=time_unix_s, **content)
                self._writer.write(event.SerializeToString())
            self._writer.flush()
        except OSError:
            with contextlib.suppress(OSError):
                self._writer.close()
            raise
