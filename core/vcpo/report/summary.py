"""The top of a report: state of the run and headline numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from vcpo.records.collapse import run_collapse
from vcpo.records.journal import HOST_STARTED, EventRecord, Metrics
from vcpo.report.numbers import UNKNOWN, decimal, duration, finite, whole
from vcpo.spec import VCPORun


class State(StrEnum):
    """Progress of a run, judged by its records alone."""

    COMPLETE = "complete"
    COLLAPSED = "collapsed"
    """All steps were taken, and the run ends far below its best."""
    UNFINISHED = "unfinished"
    """Running, or stopped before its last step."""
    EMPTY = "no steps yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One number in large print."""

    label: str
    value: str
    note: str = ""


def state_of(run: VCPORun, metrics: Metrics) -> State:
    """Return the progress of a run."""
    if not metrics.steps:
        return State.EMPTY
    if metrics.steps[-1].step < run.spec.steps:
        return State.UNFINISHED
    collapse = run_collapse(metrics)
    has_recovered = collapse is None or collapse.fall.has_recovered
    return State.COMPLETE if has_recovered else State.COLLAPSED


def headlines(
    run: VCPORun, metrics: Metrics, events: Sequence[EventRecord]
) -> tuple[Headline, ...]:
    """Return the numbers that a reader wants first."""
    taken = metrics.steps[-1].step if metrics.steps else 0
    return (
        _accuracy(metrics),
        Headline(label="Steps", value=whole(taken), note=f"of {whole(run.spec.steps)}"),
        _wall_time(metrics, events),
        _trajectories(metrics),
        _lag(run, metrics),
        _ess(metrics),
    )


def _accuracy(metrics: Metrics) -> Headline:
    if not metrics.evaluations:
        return Headline(label="Accuracy", value=UNKNOWN, note="not evaluated yet")
    first, last = metrics.evaluations[0], metrics.evaluations[-1]
    if first.step == last.step:
        value = decimal(first.accuracy, ".3f")
    else:
        value = f"{decimal(first.accuracy, '.3f')} → {decimal(last.accuracy, '.3f')}"
    return Headline(label="Accuracy", value=value, note=f"held out, at step {whole(last.step)}")


def _wall_time(metrics: Metrics, events: Sequence[EventRecord]) -> Headline:
    """Return the time of all sessions, each from the start of its host; pauses do not count."""
    times = [event.time_unix_s for event in events]
    times += [record.time_unix_s for record in metrics.steps]
    times += [record.time_unix_s for record in metrics.evaluations]
    if not times:
        return Headline(label="Wall time", value=UNKNOWN)
    sessions = _sessions(sorted(times), events)
    elapsed_s = sum(times_s[-1] - times_s[0] for times_s in sessions)
    speeds = [speed for step in metrics.steps if (speed := finite(step.tokens_per_s)) is not None]
    notes = [f"{sum(speeds) / len(speeds):,.0f} tokens/s on average"] if speeds else []
    if len(sessions) > 1:
        notes.append(f"in {len(sessions)} sessions")
    return Headline(label="Wall time", value=duration(elapsed_s), note=", ".join(notes))


def _sessions(times_s: Sequence[float], events: Sequence[EventRecord]) -> list[list[float]]:
    """Divide the times of all records, sorted, at each start of a host."""
    starts_s = [event.time_unix_s for event in events if event.kind == HOST_STARTED]
    cuts = sorted({bisect_left(times_s, start_s) for start_s in starts_s} | {0, len(times_s)})
    return [list(times_s[first:past_last]) for first, past_last in pairwise(cuts)]


def _trajectories(metrics: Metrics) -> Headline:
    if not metrics.steps:
        return Headline(label="Trajectories consumed", value=UNKNOWN)
    last = metrics.steps[-1]
    note = f"{whole(last.leased)} leased, {whole(sum(last.dropped.values()))} dropped"
    if last.dropped:
        reasons = sorted(last.dropped.items(), key=lambda item: (-item[1], item[0]))
        note += f" ({', '.join(f'{reason} {whole(count)}' for reason, count in reasons)})"
    return Headline(label="Trajectories consumed", value=whole(last.consumed), note=note)


def _lag(run: VCPORun, metrics: Metrics) -> Headline:
    bound = run.spec.algorithm.max_policy_lag_steps
    note = f"versions; bound {bound}"
    means = [mean for step in metrics.steps if (mean := finite(step.lag_mean)) is not None]
    if not means:
        return Headline(label="Lag, mean / max", value=UNKNOWN, note=note)
    worst = max(step.lag_max for step in metrics.steps)
    value = f"{sum(means) / len(means):.1f} / {worst}"
    return Headline(label="Lag, mean / max", value=value, note=note)


def _ess(metrics: Metrics) -> Headline:
    # A step whose weights have no value records an ESS ratio of 0, which no batch can have.
    known = [step for step in metrics.steps if finite(step.ess_ratio) and step.ess_ratio > 0.0]
    if not known:
        return Headline(label="Lowest ESS ratio", value=UNKNOWN)
    lowest = min(known, key=lambda step: step.ess_ratio)
    on_policy = decimal(lowest.on_policy_ess_ratio, ".2f")
    note = f"at step {whole(lowest.step)}; on-policy {on_policy}"
    return Headline(label="Lowest ESS ratio", value=decimal(lowest.ess_ratio, ".2f"), note=note)
