"""Local runs as they are seen from outside: their records, and a learner while it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from vcpo.algo import WarningLevel
from vcpo.api import SpecError, VCPORun, load_run
from vcpo.control.signals import RunSignals
from vcpo.learner_control import LearnerControl
from vcpo.local.run_dir import RunDir
from vcpo.local.terminal.run_view import RunView, first_signals, run_view
from vcpo.monitor.run_row import RunRow
from vcpo.records.journal import EventRecord, EventTail, Metrics, read_events, read_metrics
from vcpo.records.step_record import SIGNALS
from vcpo.report.summary import State, state_of
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
            return self._recorded_view(self._ended_phase())
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

    def _ended_phase(self) -> str:
        state = state_of(self._run, self._records(), read_events(self.path))
        return "stopped" if state in {State.UNFINISHED, State.EMPTY} else state.value

    def _records(self) -> Metrics:
        """Return the records; they are read again only after the file has changed."""
        path = self.path / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._metrics_size:
            self._metrics, self._metrics_size = read_metrics(self.path), size
        return self._metrics

    def _recorded_view(self, phase: str) -> RunView:
        return recorded_view(self._run, self._records(), phase=phase, now_s=self._clock())


def recorded_view(run: VCPORun, metrics: Metrics, *, phase: str, now_s: float) -> RunView:
    """Return the state of a run from its records alone.

    now_s: Unix time.
    """
    last = metrics.steps[-1] if metrics.steps else None
    first_times = [one.time_unix_s for one in metrics.steps[:1]]
    first_times += [one.time_unix_s for one in metrics.evaluations[:1]]
    began_s = min(first_times, default=now_s)
    return RunView(
        run=run,
        phase=phase,
        signals=recorded_signals(run, metrics, now_s),
        workers_desired=0,
        elapsed_s=(last.time_unix_s if last else now_s) - began_s,
    )


def recorded_signals(run: VCPORun, metrics: Metrics, now_s: float) -> RunSignals:
    """Return what the records of a run say of its last step.

    now_s: Unix time.
    """
    evaluations = metrics.evaluations
    signals = replace(
        first_signals(run), accuracy=evaluations[-1].accuracy if evaluations else None
    )
    if not metrics.steps:
        return signals
    last = metrics.steps[-1]
    taken = next((one for one in reversed(metrics.steps) if one.skipped is None), None)
    rate: dict[str, Any] = {
        name: None if taken is None else getattr(taken, name)
        for name, signal in SIGNALS
        if signal.is_of_update
    }
    return replace(
        signals,
        step=last.step,
        policy_version=last.step,
        ess_ratio=last.ess_ratio if last.has_weights else None,
        on_policy_ess_ratio=last.on_policy_ess_ratio,
        **rate,
        warning_score=last.warning_score,
        warning_level=WarningLevel(last.warning_level),
        reward_mean=last.reward_mean,
        cut_responses_ratio=last.cut_responses_ratio,
        equal_groups_ratio=last.equal_groups_ratio,
        prompt_tokens_mean=last.prompt_tokens_mean,
        lag_p50=last.lag_p50,
        lag_max=last.lag_max,
        lag_limit_steps=last.lag_limit_steps,
        buffered=last.buffered,
        in_flight=last.in_flight,
        tokens_per_s=last.tokens_per_s,
        since_step_s=max(0.0, now_s - last.time_unix_s),
    )


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
