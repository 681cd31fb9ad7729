"""A run directory's records: `metrics.jsonl` (steps, evaluations) and `events.jsonl`.

Each line is one JSON object; its last field, `crc32`, is the checksum of the bytes before it. A
single write appends it, so several processes may write events, and a reader sees half a line at
most at the end. A full disk or a lost machine may leave half a line; the next writer ends it.
Records that a full disk refuses are written when there is room. After a resume a step may stand
twice: the later record counts, see `read_metrics`.

The files are for people: no decision of training reads them. A line that is not as it was written
costs its own records and nothing else: readers skip it and name it by file and number. The checksum
is what tells: a flipped digit would still be JSON, and could undo steps or fake a collapse.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from vcpo.records.step_record import StepRecord

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
HOST_STARTED = "Started"
"""Kind of the event with which a local host begins; a resumed run has several."""
JOURNAL_DAMAGED = "JournalDamaged"
"""Kind of the event that names a line which readers skip."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Error numbers when a file cannot grow because of the disk, a quota or a limit; a file system is
made read-only after an error of its disk, and may be writable again later."""
READER = "journal"
"""Source of an event that a reader puts in the place of a damaged line."""
_MOST_UNWRITTEN = 10_000
"""Records that wait for room; of more, the oldest are lost."""
_FIELDS_NAMED = 3
"""Most fields that a notice names."""
_SUMMED: Final = re.compile(rb'(.*),"crc32":"([0-9a-f]{8})"\}', re.DOTALL)
"""A line: what is summed up, and the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedLine:
    """A line that is skipped, because it is not as a journal of this version writes it."""

    file: str
    number: int
    """Number of the line in its file, from 1."""
    cause: str
    """A clause."""

    @property
    def notice(self) -> str:
        """What a person should know of it."""
        return f"{self.file} line {self.number:,}: {self.cause}; it is skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """Accuracy on held-out prompts."""

    step: int
    """Steps taken when the evaluation started."""
    time_unix_s: float
    accuracy: float
    """Mean reward of the responses to held-out prompts."""
    num_trajectories: int
    policy_version_min: int
    """Oldest and newest version that sampled a token of the responses."""
    policy_version_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """Something that happened to a run, for people."""

    time_unix_s: float
    source: str
    """Writer of the event: `host`, `learner`, the name of a worker, or `journal` for a reader of
    it."""
    kind: str
    """CamelCase word, e.g. `WorkerLost`."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Everything `metrics.jsonl` holds, in order of steps."""

    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    damaged: tuple[DamagedLine, ...] = ()
    """Lines that were skipped, in order of the file."""


class Journal:
    """Appends records to a run directory; records that a full disk refuses wait for room."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._unwritten: deque[tuple[str, bytes]] = deque(maxlen=_MOST_UNWRITTEN)
        """Name of the file and the line, oldest first."""
        self._may_be_cut = True
        """Whether a file may end in half a line, of this writer or an earlier one."""
        run_dir.mkdir(parents=True, exist_ok=True)

    def step(self, record: StepRecord) -> None:
        """Append an optimizer step."""
        self._append(METRICS_FILE, {"type": "step", **dataclasses.asdict(record)})

    def evaluation(self, record: EvaluationRecord) -> None:
        """Append an evaluation."""
        self._append(METRICS_FILE, {"type": "evaluation", **dataclasses.asdict(record)})

    def event(self, record: EventRecord) -> None:
        """Append an event."""
        self._append(EVENTS_FILE, dataclasses.asdict(record))

    def _append(self, name: str, entry: Mapping[str, Any]) -> None:
        self._unwritten.append((name, _line(entry)))
        try:
            self._write()
        except OSError as error:
            self._may_be_cut = True
            if error.errno not in NO_ROOM:
                raise

    def _write(self) -> None:
        """Write the lines that wait, each with one write.

        Raises:
            OSError: when a line was not written whole; it keeps waiting.
        """
        if self._may_be_cut:
            for name in (METRICS_FILE, EVENTS_FILE):
                _close_last_line(self._run_dir / name)
            self._may_be_cut = False
        while self._unwritten:
            name, line = self._unwritten[0]
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            descriptor = os.open(self._run_dir / name, flags, 0o644)
            try:
                written = os.write(descriptor, line)
            finally:
                os.close(descriptor)
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
            self._unwritten.popleft()


def read_metrics(run_dir: Path) -> Metrics:
    """Return the steps and evaluations of a run, without the history that a restart undid.

    A learner that resumes from a checkpoint takes steps again. Records from the first repeated step
    on belong to parameters that are lost, and are left out. A missing file is an empty run. Lines
    that are damaged are left out too; `Metrics.damaged` names them.
    """
    steps: dict[int, StepRecord] = {}
    evaluations: dict[int, EvaluationRecord] = {}
    damaged = []
    for record in _records(METRICS_FILE, _file_lines(run_dir / METRICS_FILE), _metrics_record):
        match record:
            case DamagedLine():
                damaged.append(record)
            case StepRecord():
                if record.step in steps:
                    steps = {at: kept for at, kept in steps.items() if at < record.step}
                    evaluations = {at: kept for at, kept in evaluations.items() if at < record.step}
                steps[record.step] = record
            case EvaluationRecord():
                evaluations[record.step] = record
    return Metrics(
        steps=tuple(steps[number] for number in sorted(steps)),
        evaluations=tuple(evaluations[number] for number in sorted(evaluations)),
        damaged=tuple(damaged),
    )


def read_events(run_dir: Path) -> tuple[EventRecord, ...]:
    """Return a run's events in the order in which they were written.

    In the place of a damaged line stands an event that names it.
    """
    return tuple(EventTail(run_dir, from_start=True).read())


class EventTail:
    """Reads the events that are written after it was made; damaged lines as `read_events`.

    from_start: whether the first read returns the events that were written before, too.
    """

    def __init__(self, run_dir: Path, *, from_start: bool = False) -> None:
        self._path = run_dir / EVENTS_FILE
        self._tail = FileTail(self._path, from_start=from_start)
        self._num_lines = 0 if from_start else sum(1 for _ in _file_lines(self._path))

    def read(self) -> list[EventRecord]:
        """Return the events since the last call; an unfinished line waits for the next call."""
        lines = self._tail.read().split(b"\n")[:-1]
        numbered = enumerate(lines, start=self._num_lines + 1)
        self._num_lines += len(lines)
        events: list[EventRecord] = []
        for record in _records(EVENTS_FILE, numbered, _event_record):
            match record:
                case EventRecord():
                    events.append(record)
                case DamagedLine():
                    before = [event.time_unix_s for event in events[-1:]]
                    at_unix_s = before[0] if before else self._path.stat().st_mtime
                    events.append(damage_event(record, at_unix_s))
        return events


class StepTail:
    """Reads the steps that are taken after it was made; one that is taken again comes again.

    from_start: whether the first read returns the steps that were taken before, too.
    """

    def __init__(self, run_dir: Path, *, from_start: bool) -> None:
        self._tail = FileTail(run_dir / METRICS_FILE, from_start=from_start)

    def read(self) -> list[StepRecord]:
        """Return the steps since the last call; damaged lines are left out."""
        lines = enumerate(self._tail.read().split(b"\n")[:-1])
        found = _records(METRICS_FILE, lines, _metrics_record)
        return [each for each in found if isinstance(each, StepRecord)]


_FIELD_NAMES: Final[Mapping[object, frozenset[str]]] = {
    record_type: frozenset(each.name for each in dataclasses.fields(record_type))
    for record_type in (StepRecord, EvaluationRecord, EventRecord)
}


def damage_event(damaged: DamagedLine, time_unix_s: float) -> EventRecord:
    """Return the event that names a damaged line."""
    return EventRecord(
        time_unix_s=time_unix_s, source=READER, kind=JOURNAL_DAMAGED, message=damaged.notice
    )


_Record = TypeVar("_Record", bound=StepRecord | EvaluationRecord | EventRecord)


def _records(
    file: str,
    lines: Iterable[tuple[int, bytes]],
    parse: Callable[[dict[str, Any]], _Record],
) -> Iterator[_Record | DamagedLine]:
    """Yield what each line holds; lines come with their numbers, and without their ends."""
    for number, line in lines:
        try:
            yield parse(_entry(line))
        except (ValueError, RecursionError) as error:
            yield DamagedLine(file=file, number=number, cause=str(error))


def _metrics_record(entry: dict[str, Any]) -> StepRecord | EvaluationRecord:
    match entry.pop("type", None):
        case "step":
            return _record(StepRecord, entry)
        case "evaluation":
            return _record(EvaluationRecord, entry)
        case other:
            raise ValueError(f"no record has the type {other!r}")


def _event_record(entry: dict[str, Any]) -> EventRecord:
    return _record(EventRecord, entry)


def _record(record_type: type[_Record], entry: Mapping[str, Any]) -> _Record:
    """Return a record of all its fields.

    Raises:
        ValueError: naming a few fields that are missing or unknown.
    """
    names = _FIELD_NAMES[record_type]
    if names != entry.keys():
        others = ", ".join(sorted(names ^ entry.keys())[:_FIELDS_NAMED])
        raise ValueError(f"another version of vcpo wrote it, whose fields differ ({others})")
    return record_type(**entry)


def _line(entry: Mapping[str, Any]) -> bytes:
    """Return a line with its checksum and its end."""
    summed = json.dumps(entry, separators=(",", ":")).encode().removesuffix(b"}")
    return b'%s,"crc32":"%08x"}\n' % (summed, zlib.crc32(summed))


def _entry(line: bytes) -> dict[str, Any]:
    """Return what `_line` wrote.

    Raises:
        ValueError: if its checksum does not hold.
    """
    found = _SUMMED.fullmatch(line)
    if found is None or zlib.crc32(found[1]) != int(found[2], 16):
        raise ValueError("its checksum does not hold, or it is half a line")
    entry: dict[str, Any] = json.loads(found[1] + b"}")
    return entry


def _file_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the whole lines of a file, without their ends, by number."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                yield number, line[:-1]


def _close_last_line(path: Path) -> None:
    """End half a line that a writer left, so that the next record stands on a line of its own."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb") as written:
        written.seek(-1, os.SEEK_END)
        is_closed = written.read() == b"\n"
    if not is_closed:
        with path.open("ab") as end:
            end.write(b"\n")


RUN_FAILED = "Failed"
"""Kind of the event with which host or learner gives up; its message is the cause."""
_BEGINNINGS = {HOST_STARTED, "Resumed", "Complete", "Collapsed"}
"""Kinds of events after which an earlier failure is over."""


def failure_of(events: Sequence[EventRecord]) -> str | None:
    """Return why a run failed; None if it has not, or went on since.

    events: in the order in which they were written.
    """
    for event in reversed(events):
        if event.kind == RUN_FAILED:
            return event.message
        if event.kind in _BEGINNINGS:
            return None
    return None


class FileTail:
    """Reads the whole lines that a file gains; an unfinished line waits for its end.

    from_start: whether the first read returns what was written before, too.
    """

    def __init__(self, path: Path, *, from_start: bool) -> None:
        self._path = path
        is_from_end = path.exists() and not from_start
        self._offset_bytes = path.stat().st_size if is_from_end else 0

    def read(self) -> bytes:
        """Return the lines since the last call, each with its end; empty if there is no file."""
        if not self._path.exists():
            return b""
        with self._path.open("rb") as written:
            written.seek(self._offset_bytes)
            whole, newline, _ = written.read().rpartition(b"\n")
        self._offset_bytes += len(whole) + len(newline)
        return whole + newline
