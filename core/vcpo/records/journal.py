"""A run directory's records: `metrics.jsonl` (steps, evaluations) and `events.jsonl`.

Each line is one JSON object that a single write appends, so several processes may write events. The
files are for people: no decision of training reads them. So a record that a full disk refuses is
lost, and a line that is no record, such as half of one, is skipped. After a resume a step may stand
twice: the later record counts, see `read_metrics`.
"""

import dataclasses
import errno
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from vcpo.records.step_record import StepRecord

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
HOST_STARTED = "Started"
"""Kind of the event with which a local host begins; a resumed run has several."""
GENERATION_FAILED = "GenerationFailed"
"""Kind of the event that names a failed generation."""
RUN_FAILED = "Failed"
"""Kind of the event with which host or learner gives up; its message is the cause."""
_BEGINNINGS = {HOST_STARTED, "Resumed", "Complete", "Collapsed"}
"""Kinds of events after which an earlier failure is over."""
TURNS = {*_BEGINNINGS, "Draining", "Killed"}
"""Kinds of events with which a run begins, goes on or ends."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Error numbers when a file cannot grow because of the disk, a quota or a limit; a file system is
made read-only after an error of its disk, and may be writable again later."""
_ERRORS: Final = frozenset({RUN_FAILED, "SelfCheckFailed"})
"""Kinds of events that end the run."""
_WARNINGS: Final = frozenset(
    (  # noqa: SIM905 - one word a line would be a page
        "CalibrationStale CheckpointDamaged CollapseWarning Collapsed DiskFull"
        " DrainFailed DrainTimedOut EnginesDisagree EvaluationWithoutResult"
        " GenerationFailed GroupsDropped LearnerRestarted LogDamaged"
        " NoUpdate NotRolledBack RewardsFar RolledBack"
        " SignalsStale Throttled TrackingFailed Warning WorkerLost WorkerSetAside"
    ).split()
)
"""Kinds of events that a person should read; none ends the run before its last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """Accuracy on held-out prompts."""

    step: int
    """Steps taken when the evaluation started."""
    time_unix_s: float
    accuracy: float
    """Mean reward of the responses to held-out prompts."""
    num_prompts: int
    """Distinct prompts among them."""
    num_trajectories: int
    policy_version_min: int
    """Oldest and newest version that sampled a token of the responses."""
    policy_version_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """Something that happened to a run, for people."""

    time_unix_s: float
    source: str
    """Writer of the event: `host`, `learner` or the name of a worker."""
    kind: str
    """CamelCase word, e.g. `WorkerLost`."""
    message: str

    @property
    def level(self) -> int:
        """How serious it is, a level of `logging`."""
        if self.kind in _ERRORS:
            return logging.ERROR
        return logging.WARNING if self.kind in _WARNINGS else logging.INFO


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Everything `metrics.jsonl` holds, in order of steps."""

    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]


class Journal:
    """Appends records to a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)

    def step(self, record: StepRecord) -> None:
        self._append(METRICS_FILE, {"type": "step", **dataclasses.asdict(record)})

    def evaluation(self, record: EvaluationRecord) -> None:
        self._append(METRICS_FILE, {"type": "evaluation", **dataclasses.asdict(record)})

    def event(self, record: EventRecord) -> None:
        self._append(EVENTS_FILE, dataclasses.asdict(record))

    def _append(self, name: str, entry: Mapping[str, Any]) -> None:
        line = f"{json.dumps(entry, separators=(',', ':'))}\n".encode()
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            descriptor = os.open(self._run_dir / name, flags, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                os.write(descriptor, b"\n" + line if is_cut else line)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise


def read_metrics(run_dir: Path) -> Metrics:
    """Return the steps and evaluations of a run, without the history that a restart undid.

    A learner that resumes from a checkpoint takes steps again. Records from the first repeated step
    on belong to parameters that are lost, and are left out. A missing file is an empty run.
    """
    return MetricsTail(run_dir, from_start=True).read()


def read_events(run_dir: Path) -> tuple[EventRecord, ...]:
    """Return a run's events in the order in which they were written."""
    return tuple(EventTail(run_dir, from_start=True).read())


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
        if not self._path.is_file():  # a pipe would keep its reader waiting
            return b""
        with self._path.open("rb") as written:
            written.seek(self._offset_bytes)
            whole, newline, _ = written.read().rpartition(b"\n")
        self._offset_bytes += len(whole) + len(newline)
        return whole + newline


class EventTail:
    """Reads the events that are written after it was made; `from_start` as of a `FileTail`."""

    def __init__(self, run_dir: Path, *, from_start: bool = False) -> None:
        self._tail = FileTail(run_dir / EVENTS_FILE, from_start=from_start)

    def read(self) -> list[EventRecord]:
        found = (_record(EventRecord, entry) for entry in _entries(self._tail.read()))
        return [event for each in found for event in each]


class MetricsTail:
    """Reads the steps and evaluations that are written after it was made.

    from_start: whether the first read returns what was written before, too.
    """

    def __init__(self, run_dir: Path, *, from_start: bool) -> None:
        self._tail = FileTail(run_dir / METRICS_FILE, from_start=from_start)

    def read(self) -> Metrics:
        """Return what was written since the last call, without the history that it undoes."""
        steps: dict[int, StepRecord] = {}
        evaluations: dict[int, EvaluationRecord] = {}
        for record in _metrics_records(self._tail.read()):
            if isinstance(record, EvaluationRecord):
                evaluations[record.step] = record
                continue
            if record.step in steps:
                steps = {at: kept for at, kept in steps.items() if at < record.step}
                evaluations = {at: kept for at, kept in evaluations.items() if at < record.step}
            steps[record.step] = record
        return Metrics(
            steps=tuple(steps[number] for number in sorted(steps)),
            evaluations=tuple(evaluations[number] for number in sorted(evaluations)),
        )


def _metrics_records(lines: bytes) -> Iterator[StepRecord | EvaluationRecord]:
    for entry in _entries(lines):
        match entry.pop("type", None):
            case "step":
                yield from _record(StepRecord, entry)
            case "evaluation":
                yield from _record(EvaluationRecord, entry)


_ADAPTERS: Any = {T: TypeAdapter(T) for T in (StepRecord, EvaluationRecord, EventRecord)}
_Record = TypeVar("_Record", StepRecord, EvaluationRecord, EventRecord)


def _record(record_type: type[_Record], entry: Mapping[str, Any]) -> Iterable[_Record]:
    """Return the record; nothing if its fields are those of another version, or no numbers."""
    try:
        record: _Record = _ADAPTERS[record_type].validate_python(entry)
    except ValidationError:
        return []
    return [record] if math.isfinite(record.time_unix_s) else []


def _entries(lines: bytes) -> Iterator[dict[str, Any]]:
    for line in lines.split(b"\n"):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            yield entry
