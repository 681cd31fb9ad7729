"""Why steps make no update, in words, with what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from vcpo.journal import StepRecord

NOTICE_AFTER_STEPS = 10
"""Steps in a row without an update that are worth a notice: one or two happen in any run."""

_CAUSES = {
    "no_gradient": (
        "the rewards of each prompt's answers are all equal, so none is better than another. Cure:"
        " a reward that tells answers apart, prompts that are solved sometimes but not always, a"
        " larger batch.trajectoriesPerPrompt or a higher sampling.temperature"
    ),
    "low_ess": (
        "too little is left of each batch against one on policy. Cure: a smaller"
        " algorithm.maxPolicyLagSteps, optimizer.learningRate or algorithm.refuseBelow"
    ),
    "high_divergence": (
        "sampler and learner are too far apart. Cure: a smaller algorithm.maxPolicyLagSteps, a"
        " larger algorithm.refuseKlAbove, or the same precision for both"
    ),
    "non_finite_weight": (
        "an importance weight is not a number. Cure: the same precision for sampler and learner,"
        " or a smaller algorithm.maxPolicyLagSteps"
    ),
    "non_finite_gradient": (
        "the gradient is not a number. Cure: learner.precision float32, or a smaller"
        " optimizer.learningRate"
    ),
}


def skip_cause(reason: str) -> str:
    """Say why steps are skipped and what to do, for a reason as the records hold it."""
    return _CAUSES.get(reason, f"'{reason}'")


def no_update_notice(num_skipped: int, reason: str) -> str | None:
    """What to tell about so many steps in a row without an update; None while it is nothing."""
    if num_skipped < NOTICE_AFTER_STEPS:
        return None
    return f"The last {num_skipped} steps made no update: {skip_cause(reason)}."


def never_updated(steps: Sequence[StepRecord]) -> str | None:
    """What to tell about a run none of whose steps made an update; None when one did."""
    if not steps or any(step.skipped is None for step in steps):
        return None
    counted = f"No step made an update ({len(steps)} of {len(steps)} were skipped)"
    return f"{counted}, the model is what it was: {skip_cause(steps[-1].skipped or '')}."


def skipped_at_the_end(steps: Sequence[StepRecord]) -> int:
    """How many steps in a row, up to the last one, made no update."""
    count = 0
    for step in reversed(steps):
        if step.skipped is None:
            break
        count += 1
    return count
