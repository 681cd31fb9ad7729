"""Why steps make no update, and what to do about it, as messages for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vcpo.records.reasons import SkipReason
from vcpo.records.step_record import StepRecord

NOTICE_AFTER_STEPS = 10
"""Steps in a row without an update after which there is a notice; one or two happen in any run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Explanation:
    """Why steps are skipped, and the cure; both without a full stop."""

    cause: str
    cure: str


_EXPLANATIONS: Mapping[str, _Explanation] = {
    SkipReason.NO_GRADIENT: _Explanation(
        cause="all responses to a prompt have the same reward, so none is better than another",
        cure="a reward that distinguishes responses, prompts that are solved sometimes but not"
        " always, a larger batch.trajectoriesPerPrompt or a higher sampling.temperature",
    ),
    SkipReason.LOW_ESS: _Explanation(
        cause="the ESS ratio is too small a share of the on-policy ratio",
        cure="a smaller algorithm.maxPolicyLagSteps, optimizer.learningRate or"
        " algorithm.refuseBelow",
    ),
    SkipReason.HIGH_DIVERGENCE: _Explanation(
        cause="behavior and target policy are too far apart",
        cure="a smaller algorithm.maxPolicyLagSteps, a larger algorithm.refuseKlAbove, or the same"
        " precision for both",
    ),
    SkipReason.NON_FINITE_WEIGHT: _Explanation(
        cause="an importance weight is not a number",
        cure="the same precision for rollout and learner, or a smaller algorithm.maxPolicyLagSteps",
    ),
    SkipReason.NON_FINITE_GRADIENT: _Explanation(
        cause="the gradient is not a number",
        cure="learner.precision float32, or a smaller optimizer.learningRate",
    ),
}


def skip_cause(reason: str) -> str:
    """Return why a step was skipped, in words.

    reason: `StepRecord.skipped`.
    """
    explanation = _EXPLANATIONS.get(reason)
    return reason if explanation is None else explanation.cause


def no_update_notice(num_skipped: int, reason: str) -> str | None:
    """Return a notice about skipped steps in a row; None when they are few."""
    if num_skipped < NOTICE_AFTER_STEPS:
        return None
    return f"The last {num_skipped} steps made no update: {_with_cure(reason)}."


def never_updated_notice(steps: Sequence[StepRecord]) -> str | None:
    """Return a notice about a run in which every step was skipped; None when one was not."""
    if not steps or any(step.skipped is None for step in steps):
        return None
    return all_skipped_notice(len(steps), steps[-1].skipped or "")


def all_skipped_notice(num_steps: int, reason: str) -> str:
    """Return a notice about a run whose `num_steps` steps were all skipped."""
    counted = f"No step made an update ({num_steps} of {num_steps} were skipped)"
    return f"{counted}, the model is unchanged: {_with_cure(reason)}."


def num_skipped_at_end(steps: Sequence[StepRecord]) -> int:
    """Return how many of the last steps in a row were skipped."""
    count = 0
    for step in reversed(steps):
        if step.skipped is None:
            break
        count += 1
    return count


def _with_cure(reason: str) -> str:
    explanation = _EXPLANATIONS.get(reason)
    return reason if explanation is None else f"{explanation.cause}. Cure: {explanation.cure}"
