"""Local runs as they are seen from outside: their records, and a learner while it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from vcpo.api import SpecError, VCPORun, load_run
from vcpo.learner_control import LearnerControl
from vcpo.local.run_dir import RunDir
from vcpo.local.terminal.run_view import RunView, ended_view, recorded_view, run_view
from vcpo.monitor.run_row import RunRow
from vcpo.records.journal import EventRecord, EventTail, Metrics, read_events, read_metrics
from vcpo.service.lifecycle import Ready, read_ready
from vcpo.service.run_lock import LockHolder, is_held
from vcpo.wire.client import open_channel

_ANSWER_TIMEOUT_S = 2.0
_LEARNER = "learner"
_HOST = "host"
_ENDED = {"complete", "collapsed", "no update", "failed", "stopped"}
_EVENTS_SHOWN = 4


class LocalRun:
    """One run directory. Owner: one event loop.

    clock: Unix time, as in the records.
    Raises: SpecError if the directory's spec.yaml is not a run.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._run_dir = RunDir(path)
        self._clock = clock
        self._run: VCPORun = load_run(self._run_dir.spec)
        self._control: LearnerControl | None = None
        self._control_of: Ready | None = None
        self._metrics = Metrics(steps=(), evaluations=())
        self._metrics_size = -1
        self._events = EventTail(path)

    @property
    def is_at_work(self) -> bool:
        """Whether the host of the run is alive."""
        return is_held(self.path, LockHolder.HOST)

    def new_events(self) -> list[EventRecord]:
        """Return the events since the last call."""
        return self._events.read()

    async def view(self) -> RunView:
        """Return the state of the run now."""
        if not self.is_at_work:
            await self.close()
            return ended_view(self._run, self.path, now_s=self._clock(), metrics=self._records())
        await self._ask()
        is_ready = self._learner_ready() is not None
        signals = None if self._control is None else self._control.last_known()
        if signals is None:
            return self._recorded_view("silent" if is_ready else "starting")
        started = (
            file
            for group in self._run.spec.rollouts
            for file in self._run_dir.processes.glob(f"{group.name}-*.json")
        )
        return run_view(
            self._run,
            signals,
            learner_serves=is_ready,
            workers_desired=sum(1 for _ in started),
            elapsed_s=self._elapsed_s(),
            checkpoint_step=self._run_dir.newest_checkpoint_step,
        )

    async def close(self) -> None:
        """Close the connection to the learner."""
        if self._control is not None:
            await self._control.close()
        self._control = self._control_of = None

    async def _ask(self) -> None:
        """Request the learner's signals; an answer replaces the last one."""
        ready = self._learner_ready()
        if ready is None:
            return
        if self._control is None or ready != self._control_of:
            address = f"127.0.0.1:{ready.grpc_port}"
            channel = open_channel(address, key=self._run_dir.read_steering_key())
            if self._control is None:
                self._control = LearnerControl(channel, clock=self._clock)
            else:
                await self._control.reopen(channel)
            self._control_of = ready
        await self._control.poll(timeout_s=_ANSWER_TIMEOUT_S)

    def _learner_ready(self) -> Ready | None:
        return read_ready(self._run_dir.ready_file(_LEARNER))

    def _elapsed_s(self) -> float:
        events = read_events(self.path)
        starts = [one.time_unix_s for one in events if one.source == _HOST][:1]
        return self._clock() - starts[0] if starts else 0.0

    def _records(self) -> Metrics:
        """Return the records; they are read again only after the file has changed."""
        path = self.path / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._metrics_size:
            self._metrics, self._metrics_size = read_metrics(self.path), size
        return self._metrics

    def _recorded_view(self, phase: str) -> RunView:
        return recorded_view(self._run, self._records(), phase=phase, now_s=self._clock())


class LocalRuns:
    """The runs in some places; one that appears later is found. Owner: one event loop.

    places: run directories, or folders of run directories.
    """

    def __init__(self, places: Sequence[Path], *, clock: Callable[[], float] = time.time) -> None:
        self._places = list(places)
        self._clock = clock
        self._runs: dict[Path, LocalRun] = {}
        self._unreadable: dict[Path, str] = {}
        self._shown: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await asyncio.gather(*(run.close() for run in self._runs.values()))

    async def rows(self) -> list[RunRow]:
        """Return the runs as they are now; those that go on come first."""
        for path in run_directories(self._places):
            if path not in self._runs and path not in self._unreadable:
                try:
                    self._runs[path] = LocalRun(path, clock=self._clock)
                except SpecError as error:
                    self._unreadable[path] = str(error)
        views = await asyncio.gather(*(run.view() for run in self._runs.values()))
        rows = (
            RunRow(place=str(path), view=view) for path, view in zip(self._runs, views, strict=True)
        )
        return sorted(rows, key=lambda row: (row.view.phase in _ENDED, row.place))

    def new_events(self, place: str) -> Sequence[str]:
        """Return the lines of a run's events since the last call; at the first the last few."""
        path = Path(place)
        events: Sequence[EventRecord] = self._runs[path].new_events()
        if place not in self._shown:
            self._shown.add(place)
            events = read_events(path)[-_EVENTS_SHOWN:]
        return [f"{event.kind}: {event.message}" for event in events]

    def notice(self) -> str:
        """Return which directories cannot be read; empty if all can."""
        return " ".join(f"{path}: {why}" for path, why in self._unreadable.items())


def run_directories(places: Iterator[Path] | list[Path]) -> list[Path]:
    """Return the run directories among these places, and among the folders in them, by name."""
    found = []
    for place in places:
        if RunDir(place).spec.exists():
            found.append(place)
        elif place.is_dir():
            found += [each for each in sorted(place.iterdir()) if RunDir(each).spec.exists()]
    return list(dict.fromkeys(found))


class LocalEvents:
    """The events of a run directory, the host's and the learner's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tail = EventTail(path, from_start=True)

    def read(self) -> list[EventRecord]:
        """Return the events since the last call; at the first call all events."""
        return self._tail.read()

    def has_ended(self) -> bool:
        """Return whether the host of the run has ended."""
        return not is_held(self._path, LockHolder.HOST)
