"""The two sources of `vcpo top`: run directories of this machine, and a cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from vcpo.monitor.cluster_runs import ClusterRuns, run_events
from vcpo.monitor.kubectl import KubectlError, Scope
from vcpo.monitor.local_run import LocalRun, run_directories
from vcpo.monitor.run_row import RunRow
from vcpo.records.journal import EventRecord, read_events
from vcpo.spec import SpecError

_ENDED = {"complete", "collapsed", "no update", "failed", "stopped"}
_EVENTS_SHOWN = 4


class LocalSource:
    """Runs in directories; a run that appears later is found. Owner: one event loop."""

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
            RunRow(place=str(path), view=view, age_s=view.step_age_s)
            for path, view in zip(self._runs, views, strict=True)
        )
        return sorted(rows, key=lambda row: (row.view.phase in _ENDED, row.place))

    async def new_events(self, place: str) -> Sequence[str]:
        """Return the lines of a run's events since the last call; at the first the last few."""
        path = Path(place)
        if place not in self._shown:
            self._shown.add(place)
            self._runs[path].new_events()
            return [_line(event) for event in read_events(path)[-_EVENTS_SHOWN:]]
        return [_line(event) for event in self._runs[path].new_events()]

    def notice(self) -> str:
        """Return which directories cannot be read; empty if all can."""
        return " ".join(f"{path}: {why}" for path, why in self._unreadable.items())


class ClusterSource:
    """Runs of a cluster. Owner: one event loop."""

    def __init__(self, scope: Scope, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._runs = ClusterRuns(scope)
        self._newest_s: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        """Begin to watch.

        Raises: KubectlError.
        """
        await self._runs.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the watch."""
        await self._runs.close()

    async def rows(self) -> list[RunRow]:
        """Return the runs as they are now."""
        return self._runs.rows(self._clock())

    async def new_events(self, place: str) -> Sequence[str]:
        """Return the lines of a run's events since the last call; at the first the last few."""
        namespace, _, name = place.partition("/")
        try:
            events = await asyncio.to_thread(run_events, Scope(namespace=namespace), name)
        except KubectlError:
            return ()
        newest_s = self._newest_s.get(place)
        new = [event for event in events if newest_s is None or event.time_unix_s > newest_s]
        if events:
            self._newest_s[place] = events[-1].time_unix_s
        return [_line(event) for event in (new[-_EVENTS_SHOWN:] if newest_s is None else new)]

    def notice(self) -> str:
        """Return why the newest watch ended; empty while it goes on."""
        return self._runs.trouble


def _line(event: EventRecord) -> str:
    return f"{event.kind}: {event.message}"
