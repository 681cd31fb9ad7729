"""What a journal says about a collapse: when the warning came, what followed, how it ended."""

from collections.abc import Sequence
from statistics import fmean

from vcpo.algo.health.collapse import num_low_at_end, share_error
from vcpo.judgement import is_critical
from vcpo.records.journal import EvaluationRecord
from vcpo.records.step_record import StepRecord

RECOVERED_SHARE = 0.8
"""Share of the best accuracy before the warning at which a run counts as recovered."""
_LAST_EVALUATIONS = 3
"""One alone is as noisy as a run that trains at a large lag."""
_STEPS_SEEN = 3
"""Steps of a fifth of a second within which a scrape surely comes."""


def first_critical_step(steps: Sequence[StepRecord]) -> int | None:
    """The first step whose early warning was critical or worse; None when no step's was."""
    return next((each.step for each in steps if is_critical(each)), None)


def first_tightened_step(steps: Sequence[StepRecord], max_policy_lag_steps: int) -> int | None:
    """The first step whose batch was taken under an admission lag below the run's own bound."""
    return next((each.step for each in steps if each.lag_limit_steps < max_policy_lag_steps), None)


def critical_to_throttle_steps(
    steps: Sequence[StepRecord], max_policy_lag_steps: int
) -> int | None:
    """Steps from the first critical warning to the first step under a tightened admission lag.

    0 when the limit was tightened before the warning; None when one of the two never came.
    """
    critical = first_critical_step(steps)
    tightened = first_tightened_step(steps, max_policy_lag_steps)
    if critical is None or tightened is None:
        return None
    return max(0, tightened - critical)


def steps_on_older_data(steps: Sequence[StepRecord], max_policy_lag_steps: int) -> int:
    """Steps that used a token older than the first tightened admission lag, while it was in force.

    They are counted from the first step whose batch was taken under that limit, up to the step at
    which the limit is above it again.
    """
    first = first_tightened_step(steps, max_policy_lag_steps)
    if first is None:
        return 0
    after = [each for each in steps if each.step >= first]
    tightened = after[0].lag_limit_steps
    older = 0
    for each in after:
        if each.lag_limit_steps > tightened:
            break
        older += each.lag_max > tightened
    return older


def has_recovered(steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord]) -> bool:
    """Whether the last accuracies are, in the mean, at a share of the best up to the warning."""
    critical = first_critical_step(steps)
    if critical is None:
        return True
    before = [each.accuracy for each in evaluations if each.step <= critical]
    last = fmean(each.accuracy for each in evaluations[-_LAST_EVALUATIONS:])
    return last >= RECOVERED_SHARE * max(before)


def due_alerts(
    steps: Sequence[StepRecord], evaluations: Sequence[EvaluationRecord] = ()
) -> set[str]:
    """Return the alerts of which the steps had enough in a row that a scrape cannot have missed it.

    The rules ask for 3 and for 10 steps; a scrape comes every second step or so. An evaluation is
    shown until the next one, but for that after the last step.
    """
    accuracies = [each.accuracy for each in evaluations][:-1]
    errors = [share_error(each.accuracy, each.num_prompts) for each in evaluations][:-1]
    lasted = {
        "VCPOEvaluationFalling": any(
            num_low_at_end(accuracies[:end], errors=errors[:end]) >= 2
            for end in range(1, 1 + len(accuracies))
        ),
        "VCPOCollapseWarning": max(each.critical_steps for each in steps) >= 3 + _STEPS_SEEN,
        "VCPORewardCollapsed": max(each.collapsed_steps for each in steps) >= 10 + _STEPS_SEEN,
        "VCPOLearningRateBackedOff": sum(each.learning_rate_backoff <= 0.25 for each in steps)
        >= _STEPS_SEEN,
    }
    return {name for name, is_due in lasted.items() if is_due}
