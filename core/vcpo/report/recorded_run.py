"""A run as its directory records it, with everything that a report reads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from pathlib import Path

from vcpo.api import VCPORun, load_run
from vcpo.control.signals import RunSignals
from vcpo.judgement import Evidence, Judgement, judgements, recorded_phase
from vcpo.records.journal import (
    GENERATION_FAILED,
    HOST_STARTED,
    EventRecord,
    Metrics,
    failure_of,
    read_events,
    read_metrics,
)
from vcpo.records.samples import Sample, read_answers, read_samples, sampled_steps
from vcpo.report.numbers import duration, whole
from vcpo.report.outcome import before_and_after, held_out_text
from vcpo.service.run_lock import is_locked

SPEC_FILE = "spec.yaml"
_NONE = Metrics(steps=(), evaluations=())


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The spec and the records of a run."""

    run: VCPORun
    metrics: Metrics
    events: tuple[EventRecord, ...] = ()
    samples: tuple[Sample, ...] = ()
    """Responses of the last and the first step that kept some."""
    answers: tuple[tuple[Sample, Sample], ...] = ()
    """`before_and_after` of the evaluations."""
    run_dir: Path = Path()
    is_at_work: bool = True
    """Whether a host or a learner holds the directory."""

    @cached_property
    def clock(self) -> RunClock:
        return RunClock(self.metrics, self.events)

    @property
    def last_step(self) -> int:
        return self.metrics.steps[-1].step if self.metrics.steps else 0

    @property
    def phase(self) -> str:
        at_work, spec = self.is_at_work, self.run.spec
        return recorded_phase(spec, self.metrics, self.events, is_at_work=at_work)

    @property
    def headline(self) -> str:
        """What came of the run, in a sentence."""
        steps = f"{whole(self.last_step)} of {whole(self.run.spec.steps)} steps"
        if self.last_step == self.run.spec.steps:
            steps = f"{whole(self.last_step)} steps"
        taken = f"{steps} ({duration(self.clock.total_s)})"
        if not (held_out := held_out_text(self.metrics)):
            return taken
        return f"Held-out reward {held_out}{'; ' if 'step' in held_out else ' in '}{taken}"

    @property
    def judgements(self) -> tuple[Judgement, ...]:
        """What is the matter with the run, the most urgent first."""
        signals = recorded_signals(self.run, self.metrics, events=self.events)
        evidence = Evidence(
            spec=self.run.spec,
            signals=replace(signals, failure=failure_of(self.events) or ""),
            phase=self.phase,
            metrics=self.metrics,
        )
        return judgements(evidence)


def read_run(run_dir: Path) -> RecordedRun:
    """Read a run directory."""
    steps = sampled_steps(run_dir)
    return RecordedRun(
        run=load_run(run_dir / SPEC_FILE),
        metrics=read_metrics(run_dir),
        events=read_events(run_dir),
        samples=tuple(read_samples(run_dir, sorted({*steps[:1], *steps[-1:]}, reverse=True))),
        answers=tuple(before_and_after(read_answers(run_dir))),
        run_dir=run_dir,
        is_at_work=is_locked(run_dir),
    )


def recorded_signals(
    run: VCPORun, metrics: Metrics = _NONE, now_s: float = 0.0, events: Sequence[EventRecord] = ()
) -> RunSignals:
    """Return what the records of a run say of its last step, and of its last failed generation.

    now_s: Unix time.
    """
    spec, last = run.spec, metrics.steps[-1] if metrics.steps else None
    return RunSignals(
        last=last,
        policy_version=last.step if last else 0,
        lag_limit_steps=last.lag_limit_steps if last else spec.algorithm.max_policy_lag_steps,
        batch_trajectories=spec.batch.trajectories,
        buffered=last.buffered if last else 0,
        in_flight=last.in_flight if last else 0,
        generation_failure=next(
            (each.message for each in reversed(events) if each.kind == GENERATION_FAILED), ""
        ),
        accuracy=metrics.evaluations[-1].accuracy if metrics.evaluations else None,
        since_step_s=max(0.0, now_s - last.time_unix_s) if last else None,
    )


class RunClock:
    """Turns times of records into seconds since the start of the run.

    A local host writes an event when it starts. Between the last record of one session and the
    start of the next the run did not run, and this clock stands still. A run in a cluster writes no
    such event; its clock starts with the first record.
    """

    def __init__(self, metrics: Metrics, events: Sequence[EventRecord]) -> None:
        times = [event.time_unix_s for event in events]
        times += [record.time_unix_s for record in metrics.steps]
        times += [record.time_unix_s for record in metrics.evaluations]
        times.sort()
        starts = {event.time_unix_s for event in events if event.kind == HOST_STARTED}
        self._starts_s = sorted(starts | set(times[:1]))
        ends = [max(at for at in times if at < after) for _, after in pairwise(self._starts_s)]
        ends += times[-1:]
        spans_s = [end - start for start, end in zip(self._starts_s, ends, strict=True)]
        self._elapsed_s = list(accumulate(spans_s, initial=0.0))

    @property
    def num_sessions(self) -> int:
        return len(self._starts_s)

    @property
    def total_s(self) -> float | None:
        return self._elapsed_s[-1] if self._starts_s else None

    def elapsed_s(self, time_unix_s: float) -> float:
        """Return the seconds in which the run had run at a time; 0 before its start."""
        session = bisect_right(self._starts_s, time_unix_s) - 1
        if session < 0:
            return 0.0
        return self._elapsed_s[session] + time_unix_s - self._starts_s[session]


MAX_EVENTS = 500
"""Largest number of events that a report lists; of more, the newest are."""

_FEWEST_FOLDED = 3
"""Shorter repetitions are not folded."""
_FOLDED_ANYWHERE = ("StepSkipped",)
"""Kinds whose events are folded also when other events lie between them."""


def event_rows(events: Sequence[EventRecord]) -> list[tuple[EventRecord, ...]]:
    """Return the rows of events, oldest first: an event each, or several of one kind.

    Three or more events in a row of one kind and source are one row. Skipped steps are one row for
    the whole run, at the place of the last of them.
    """
    folded = [tuple(each for each in events if each.kind == kind) for kind in _FOLDED_ANYWHERE]
    others = [event for event in events if event.kind not in _FOLDED_ANYWHERE]
    in_a_row = groupby(others, key=lambda each: (each.source, each.kind))
    folded += [tuple(group) for _, group in in_a_row]
    rows: list[tuple[EventRecord, ...]] = []
    for alike in folded:
        rows += [alike] if len(alike) >= _FEWEST_FOLDED else [(event,) for event in alike]
    places = {id(event): place for place, event in enumerate(events)}
    return sorted(rows, key=lambda row: places[id(row[-1])])
