"""A run directory's records: `metrics.jsonl` (steps, evaluations) and `events.jsonl`.

Each line is one JSON object. A single write appends it, so several processes may write events, and
a reader sees half a line at most at the end. A full disk or a lost machine may leave half a line;
the next writer ends it, and readers skip it. Records that a full disk refuses are written when
there is room. After a resume a step may stand twice: the later record counts, see `read_metrics`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vcpo.records.file_tail import FileTail
from vcpo.records.step_record import StepRecord

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
HOST_STARTED = "Started"
"""Kind of the event with which a local host begins; a resumed run has several."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Error numbers when a file cannot grow because of the disk, a quota or a limit; a file system is
made read-only after an error of its disk, and may be writable again later."""
_MOST_UNWRITTEN = 10_000
"""Records that wait for room; of more, the oldest are lost."""


class RecordError(Exception):
    """A record lacks a field; the message names file and field, and the cure."""


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
    """Who wrote it: `host`, `learner` or the name of a worker."""
    kind: str
    """CamelCase word, e.g. `WorkerLost`."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Everything `metrics.jsonl` holds, in order of steps."""

    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]


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
        line = json.dumps(entry, separators=(",", ":")) + "\n"
        self._unwritten.append((name, line.encode()))
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
    on belong to parameters that are lost, and are left out. A missing file is an empty run.

    Raises:
        RecordError: when a record lacks a field.
    """
    steps: dict[int, StepRecord] = {}
    evaluations: dict[int, EvaluationRecord] = {}
    path = run_dir / METRICS_FILE
    for entry in _lines(path):
        if entry.get("type") == "step":
            step = _record(StepRecord, entry, path)
            if step.step in steps:
                steps = {number: kept for number, kept in steps.items() if number < step.step}
                evaluations = {at: kept for at, kept in evaluations.items() if at < step.step}
            steps[step.step] = step
        elif entry.get("type") == "evaluation":
            evaluation = _record(EvaluationRecord, entry, path)
            evaluations[evaluation.step] = evaluation
    return Metrics(
        steps=tuple(steps[number] for number in sorted(steps)),
        evaluations=tuple(evaluations[number] for number in sorted(evaluations)),
    )


def unrecorded_fields(run_dir: Path) -> frozenset[str]:
    """Return the fields of a step record that the last step of a run lacks.

    An older version of vcpo wrote such a run. The fields have their defaults, which say nothing.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return frozenset()
    with path.open(encoding="utf-8") as lines:
        # A whole step is known by its two ends: to parse all lines takes long.
        whole = (
            each for each in lines if each.startswith('{"type":"step",') and each.endswith("}\n")
        )
        steps = deque(whole, maxlen=1)
    with contextlib.suppress(IndexError, json.JSONDecodeError):  # no step, or half of one
        recorded: dict[str, Any] = json.loads(steps[0])
        return _field_names(StepRecord) - recorded.keys()
    return frozenset()


def read_events(run_dir: Path) -> tuple[EventRecord, ...]:
    """Return a run's events in the order in which they were written."""
    path = run_dir / EVENTS_FILE
    return tuple(_record(EventRecord, entry, path) for entry in _lines(path))


class EventTail:
    """Reads the events that are written after it was made.

    from_start: whether the first read returns the events that were written before, too.
    """

    def __init__(self, run_dir: Path, *, from_start: bool = False) -> None:
        self._path = run_dir / EVENTS_FILE
        self._tail = FileTail(self._path, from_start=from_start)

    def read(self) -> list[EventRecord]:
        """Return the events since the last call; an unfinished line waits for the next call."""
        events = []
        for line in self._tail.read().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # half a line of a writer that died
                events.append(_record(EventRecord, json.loads(line), self._path))
        return events


_Record = TypeVar("_Record", StepRecord, EvaluationRecord, EventRecord)


def _record(record_type: type[_Record], entry: Mapping[str, Any], source: Path) -> _Record:
    known = _field_names(record_type)
    try:
        return record_type(**{name: value for name, value in entry.items() if name in known})
    except TypeError as error:
        raise RecordError(
            f"{source} has a {record_type.__name__} that cannot be read ({error}): another version"
            " of vcpo wrote it; read it with that version"
        ) from error


def _field_names(record_type: type[StepRecord | EvaluationRecord | EventRecord]) -> frozenset[str]:
    return frozenset(item.name for item in dataclasses.fields(record_type))


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


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                with contextlib.suppress(json.JSONDecodeError):  # half a line of a writer that died
                    yield json.loads(line)
