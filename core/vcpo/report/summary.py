"""The headline numbers of a report."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from vcpo.api import VCPORun
from vcpo.records.journal import Metrics
from vcpo.report.numbers import UNKNOWN, decimal, duration, finite, whole
from vcpo.report.recorded_run import RecordedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One number in large print."""

    label: str
    value: str
    note: str = ""


def headlines(recorded: RecordedRun) -> tuple[Headline, ...]:
    """Return the numbers that a reader wants first."""
    run, metrics = recorded.run, recorded.metrics
    taken = metrics.steps[-1].step if metrics.steps else 0
    return (
        _accuracy(metrics),
        Headline(label="Steps", value=whole(taken), note=f"of {whole(run.spec.steps)}"),
        _wall_time(recorded),
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


def _wall_time(recorded: RecordedRun) -> Headline:
    total_s = recorded.clock.total_s
    steps, num_sessions = recorded.metrics.steps, recorded.clock.num_sessions
    speeds = [speed for step in steps if (speed := finite(step.tokens_per_s)) is not None]
    notes = [f"{fmean(speeds):,.0f} tokens/s on average"] if speeds else []
    if num_sessions > 1:
        notes.append(f"in {num_sessions} sessions")
    return Headline(label="Wall time", value=duration(total_s), note=", ".join(notes))


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
    limit = run.spec.algorithm.max_policy_lag_steps
    note = f"versions; limit {limit}"
    means = [mean for step in metrics.steps if (mean := finite(step.lag_mean)) is not None]
    if not means:
        return Headline(label="Lag, mean / max", value=UNKNOWN, note=note)
    worst = max(step.lag_max for step in metrics.steps)
    value = f"{sum(means) / len(means):.1f} / {worst}"
    return Headline(label="Lag, mean / max", value=value, note=note)


def _ess(metrics: Metrics) -> Headline:
    known = [step for step in metrics.steps if step.has_weights]
    if not known:
        return Headline(label="Lowest ESS ratio", value=UNKNOWN)
    lowest = min(known, key=lambda step: step.ess_ratio)
    on_policy = decimal(lowest.on_policy_ess_ratio, ".2f")
    note = f"at step {whole(lowest.step)}; on-policy {on_policy}"
    return Headline(label="Lowest ESS ratio", value=decimal(lowest.ess_ratio, ".2f"), note=note)
