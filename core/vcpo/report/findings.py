"""The checks of a report: what a run promised and whether it kept it, each in a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.api import VCPORun
from vcpo.control.limits import STARVED_IDLE_RATIO
from vcpo.control.verdict import Grade
from vcpo.records.collapse import collapse_notice, critical_at_end_notice, is_critical
from vcpo.records.journal import Metrics
from vcpo.records.no_update import never_updated_notice, no_update_notice, num_skipped_at_end
from vcpo.records.step_record import StepRecord
from vcpo.report.numbers import finite, whole
from vcpo.report.recorded_run import RecordedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check, in a sentence."""

    grade: Grade
    text: str


def findings(recorded: RecordedRun) -> tuple[Finding, ...]:
    """Check the guarantees of a run, the worst result first; none without steps."""
    run, metrics = recorded.run, recorded.metrics
    if not metrics.steps:
        return ()
    outcomes: tuple[Finding, ...] = (
        _reward_lasted(metrics),
        _warning_stayed_quiet(metrics.steps),
        _lag_is_bounded(run, metrics.steps),
        _ess_has_room(run, metrics.steps),
        _steps_were_taken(metrics.steps),
        _accounts_balance(metrics.steps),
        _learner_is_fed(run, metrics.steps),
    )
    if metrics.steps[-1].rollbacks:
        outcomes = (*outcomes, _was_rolled_back(metrics.steps))
    if metrics.steps[-1].learning_rate_backoff < 1.0:
        outcomes = (*outcomes, _rate_was_lowered(metrics.steps))
    urgency = (Grade.BAD, Grade.NOTICE, Grade.GOOD)
    return tuple(sorted(outcomes, key=lambda finding: urgency.index(finding.grade)))


def _reward_lasted(metrics: Metrics) -> Finding:
    if (collapsed := collapse_notice(metrics)) is not None:
        return Finding(grade=Grade.BAD, text=collapsed)
    text = "The reward did not collapse: it never fell below half of its best before."
    return Finding(grade=Grade.GOOD, text=text)


def _was_rolled_back(steps: Sequence[StepRecord]) -> Finding:
    first, number = next(step for step in steps if step.rollbacks), steps[-1].rollbacks
    times = "once" if number == 1 else f"{number} times"
    text = (
        f"The run went back to its last good checkpoint {times}, first at step {whole(first.step)}."
    )
    return Finding(grade=Grade.NOTICE, text=text)


def _rate_was_lowered(steps: Sequence[StepRecord]) -> Finding:
    first = next(step for step in steps if step.learning_rate_backoff < 1.0)
    text = (
        f"Critical warnings and rollbacks lowered the learning rate from step {whole(first.step)}"
        f" on; the run ends at {steps[-1].learning_rate_backoff:g} of its rate."
    )
    return Finding(grade=Grade.NOTICE, text=text)


def _warning_stayed_quiet(steps: Sequence[StepRecord]) -> Finding:
    """Judge the early warning; a false alarm in the middle of a run is not bad."""
    if (critical_now := critical_at_end_notice(steps)) is not None:
        return Finding(grade=Grade.BAD, text=critical_now)
    critical = [step for step in steps if is_critical(step)]
    alarms = [step for step in steps if step.warning_level != WarningLevel.OK]
    if critical:
        text = (
            f"The early warning was critical at {_steps(len(critical))}, first at step"
            f" {whole(critical[0].step)}; it is {steps[-1].warning_level} at the last step."
        )
        return Finding(grade=Grade.NOTICE, text=text)
    if alarms:
        first = whole(alarms[0].step)
        text = f"The early warning warned at {_steps(len(alarms))}, first at step {first}."
        return Finding(grade=Grade.NOTICE, text=text)
    return Finding(grade=Grade.GOOD, text="The early warning of a collapse stayed quiet.")


def _lag_is_bounded(run: VCPORun, steps: Sequence[StepRecord]) -> Finding:
    limit = run.spec.algorithm.max_policy_lag_steps
    worst = max(step.lag_max for step in steps)
    if worst > limit:
        count = sum(step.lag_max > limit for step in steps)
        text = f"{_steps(count)} trained on tokens {worst} versions old; the lag limit is {limit}."
        return Finding(grade=Grade.BAD, text=text)
    text = f"Every trained token was within the lag limit: at most {worst} of {limit} versions."
    return Finding(grade=Grade.GOOD, text=text)


def _ess_has_room(run: VCPORun, steps: Sequence[StepRecord]) -> Finding:
    floor = run.spec.control.ess_floor_ratio
    known = [step for step in steps if step.has_weights]
    below = [step for step in known if step.ess_ratio < floor * step.on_policy_ess_ratio]
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
    if share > STARVED_IDLE_RATIO:
        text = f"The learner waited for data {share:.0%} of its time; more workers would help."
        return Finding(grade=Grade.NOTICE, text=text)
    text = f"The learner waited for data {share:.0%} of its time."
    return Finding(grade=Grade.GOOD, text=text)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"
