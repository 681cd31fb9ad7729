"""Why steps make no update, in words, with what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vcpo.records.step_record import StepRecord

NOTICE_AFTER_STEPS = 10
"""Steps in a row without an update that are worth a notice: one or two happen in any run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Explanation:
    """Why steps are skipped, and what to do about it; both without a full stop."""

    cause: str
    cure: str


_EXPLANATIONS = {
    "no_gradient": _Explanation(
        cause="the rewards of each prompt's answers are all equal, so none is better than another",
        cure="a reward that tells answers apart, prompts that are solved sometimes but not always,"
        " a larger batch.trajectoriesPerPrompt or a higher sampling.temperature",
    ),
    "low_ess": _Explanation(
        cause="the ESS is too small a share of the on-policy one",
        cure="a smaller algorithm.maxPolicyLagSteps, optimizer.learningRate or"
        " algorithm.refuseBelow",
    ),
    "high_divergence": _Explanation(
        cause="sampler and learner are too far apart",
        cure="a smaller algorithm.maxPolicyLagSteps, a larger algorithm.refuseKlAbove, or the same"
        " precision for both",
    ),
    "non_finite_weight": _Explanation(
        cause="an importance weight is not a number",
        cure="the same precision for sampler and learner, or a smaller algorithm.maxPolicyLagSteps",
    ),
    "non_finite_gradient": _Explanation(
        cause="the gradient is not a number",
        cure="learner.precision float32, or a smaller optimizer.learningRate",
    ),
}


def skip_cause(reason: str) -> str:
    """Say why a step was skipped, for a reason as the records hold it."""
    explanation = _EXPLANATIONS.get(reason)
    return reason if explanation is None else explanation.cause


def no_update_notice(num_skipped: int, reason: str) -> str | None:
    """What to tell about so many steps in a row without an update; None while it is nothing."""
    if num_skipped < NOTICE_AFTER_STEPS:
        return None
    return f"The last {num_skipped} steps made no update: {_with_cure(reason)}."


def never_updated(steps: Sequence[StepRecord]) -> str | None:
    """What to tell about a run none of whose steps made an update; None when one did."""
    if not steps or any(step.skipped is None for step in steps):
        return None
    return no_step_updated(len(steps), steps[-1].skipped or "")


def no_step_updated(num_steps: int, reason: str) -> str:
    """What to tell about a run whose steps, so many, were all skipped."""
    counted = f"No step made an update ({num_steps} of {num_steps} were skipped)"
    return f"{counted}, the model is unchanged: {_with_cure(reason)}."


def skipped_at_the_end(steps: Sequence[StepRecord]) -> int:
    """How many steps in a row, up to the last one, made no update."""
    count = 0
    for step in reversed(steps):
        if step.skipped is None:
            break
        count += 1
    return count


def _with_cure(reason: str) -> str:
    explanation = _EXPLANATIONS.get(reason)
    return reason if explanation is None else f"{explanation.cause}. Cure: {explanation.cure}"
