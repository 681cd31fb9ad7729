"""The top of a report: state of the run, headline numbers, and the results of its checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vcpo.records.journal import EventRecord, Metrics
from vcpo.records.no_update import never_updated_notice, no_update_notice, num_skipped_at_end
from vcpo.records.step_record import StepRecord
from vcpo.report.numbers import UNKNOWN, decimal, duration, finite, whole
from vcpo.spec import VCPORun


class State(StrEnum):
    """Progress of a run, judged by its steps alone."""

    COMPLETE = "complete"
    UNFINISHED = "unfinished"
    """Running, or stopped before its last step."""
    EMPTY = "no steps yet"


class Grade(StrEnum):
    """Result of a check."""

    GOOD = "good"
    NOTICE = "notice"
    """Worth knowing, but the method handles it."""
    BAD = "bad"
    """A guarantee was broken, or the model does not learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One number in large print."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check, in a sentence."""

    grade: Grade
    text: str


def state_of(run: VCPORun, metrics: Metrics) -> State:
    """Return the progress of a run."""
    if not metrics.steps:
        return State.EMPTY
    return State.COMPLETE if metrics.steps[-1].step >= run.spec.steps else State.UNFINISHED


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


def findings(run: VCPORun, metrics: Metrics) -> tuple[Finding, ...]:
    """Check the guarantees of a run, the worst result first; empty before its first step."""
    if not metrics.steps:
        return ()
    outcomes = (
        _lag_is_bounded(run, metrics.steps),
        _ess_has_room(run, metrics.steps),
        _steps_were_taken(metrics.steps),
        _accounts_balance(metrics.steps),
        _learner_is_fed(run, metrics.steps),
    )
    urgency = (Grade.BAD, Grade.NOTICE, Grade.GOOD)
    return tuple(sorted(outcomes, key=lambda finding: urgency.index(finding.grade)))


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
    times = [event.time_unix_s for event in events]
    times += [record.time_unix_s for record in metrics.steps]
    times += [record.time_unix_s for record in metrics.evaluations]
    if not times:
        return Headline(label="Wall time", value=UNKNOWN)
    elapsed_s = max(times) - min(times)
    speeds = [speed for step in metrics.steps if (speed := finite(step.tokens_per_s)) is not None]
    note = f"{sum(speeds) / len(speeds):,.0f} tokens/s on average" if speeds else ""
    return Headline(label="Wall time", value=duration(elapsed_s), note=note)


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
    known = [step for step in metrics.steps if finite(step.ess_ratio) is not None]
    if not known:
        return Headline(label="Lowest ESS ratio", value=UNKNOWN)
    lowest = min(known, key=lambda step: step.ess_ratio)
    on_policy = decimal(lowest.on_policy_ess_ratio, ".2f")
    note = f"at step {whole(lowest.step)}; on-policy {on_policy}"
    return Headline(label="Lowest ESS ratio", value=decimal(lowest.ess_ratio, ".2f"), note=note)


def _lag_is_bounded(run: VCPORun, steps: Sequence[StepRecord]) -> Finding:
    bound = run.spec.algorithm.max_policy_lag_steps
    worst = max(step.lag_max for step in steps)
    if worst > bound:
        count = sum(step.lag_max > bound for step in steps)
        text = f"{_steps(count)} trained on tokens {worst} versions old; the bound is {bound}."
        return Finding(grade=Grade.BAD, text=text)
    text = f"Every trained token was within the lag bound: at most {worst} of {bound} versions."
    return Finding(grade=Grade.GOOD, text=text)


def _ess_has_room(run: VCPORun, steps: Sequence[StepRecord]) -> Finding:
    floor = run.spec.control.ess_floor_ratio
    below = [step for step in steps if step.ess_ratio < floor * step.on_policy_ess_ratio]
    if not below:
        text = f"The ESS ratio stayed above its floor, {floor:.0%} of the on-policy ratio."
        return Finding(grade=Grade.GOOD, text=text)
    worst = min(below, key=lambda step: step.ess_ratio)
    text = (
        f"{_steps(len(below))} had an ESS ratio below the floor ({floor:.0%} of on-policy); the "
        f"worst was {worst.ess_ratio:.3f} at step {whole(worst.step)}, where the learning rate was "
        f"scaled to {worst.learning_rate_scale:.2f}."
    )
    return Finding(grade=Grade.NOTICE, text=text)


def _steps_were_taken(steps: Sequence[StepRecord]) -> Finding:
    reasons = Counter(step.skipped for step in steps if step.skipped is not None)
    if not reasons:
        return Finding(grade=Grade.GOOD, text="No step was skipped.")
    if (nothing := never_updated_notice(steps)) is not None:
        return Finding(grade=Grade.BAD, text=nothing)
    stopped = no_update_notice(num_skipped_at_end(steps), steps[-1].skipped or "")
    if stopped is not None:
        return Finding(grade=Grade.BAD, text=stopped)
    listed = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    text = f"{_steps(reasons.total())} made no update, marked ▲ below the curves: {listed}."
    return Finding(grade=Grade.NOTICE, text=text)


def _accounts_balance(steps: Sequence[StepRecord]) -> Finding:
    off = [step for step in steps if _num_unaccounted(step) != 0]
    if off:
        text = (
            f"Trajectories do not add up since step {whole(off[0].step)}: leased minus in flight, "
            f"buffered, consumed and dropped is {_num_unaccounted(off[0])}, not 0."
        )
        return Finding(grade=Grade.BAD, text=text)
    text = "Trajectories add up at every step: leased = in flight + buffered + consumed + dropped."
    return Finding(grade=Grade.GOOD, text=text)


def _num_unaccounted(step: StepRecord) -> int:
    known = step.in_flight + step.buffered + step.consumed + sum(step.dropped.values())
    return step.leased - known


def _learner_is_fed(run: VCPORun, steps: Sequence[StepRecord]) -> Finding:
    idle_s, busy_s = sum(step.idle_s for step in steps), sum(step.step_s for step in steps)
    total_s = finite(idle_s + busy_s)
    share = idle_s / total_s if total_s else 0.0
    if share > run.spec.control.idle_high_ratio:
        text = f"The learner waited for data {share:.0%} of its time; more workers would help."
        return Finding(grade=Grade.NOTICE, text=text)
    text = f"The learner waited for data {share:.0%} of its time."
    return Finding(grade=Grade.GOOD, text=text)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"
