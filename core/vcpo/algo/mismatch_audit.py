"""Do sampler and learner compute the same policy? Asked of fresh trajectories, when a run starts.

At lag 0 both hold the same parameters, and what they say of the same tokens differs by rounding
alone. A wrong model revision, tokenizer, prompt format or temperature, or a number format that
nobody asked for, differs by much more, and would be trained on as if it were staleness: steps
shrink, nothing fails, and the run is worthless.

The measure is the mean over tokens of |log pi - log mu|, nats. What is to be expected depends on
how the two compute, so the limit lies between what that costs and what a mistake costs:

    float32 both        5e-7 measured, 1e-3 with TF32; bfloat16 by mistake costs 4e-3 to 9e-3
    bfloat16            about 1e-2; a temperature of 0.9 for 1.0 costs 0.04
    quantized or noisy  0.005 (int8), 0.02 (fp8), 0.08 (noise of 0.05); another model costs nats

Source: the audit of Jet-RL, arXiv 2601.14243 (gap of log-probabilities at lag 0); the limits are
this project's, of models below 30 M parameters (`tests/integration/test_rollout_numerics.py`).
"""

from collections.abc import Sequence
from enum import StrEnum

from vcpo.algo.lag_breakdown import LagBucket


class MismatchClass(StrEnum):
    """How sampler and learner compute, as far as a run asks for it."""

    EXACT = "exact"
    """Both in float32."""
    ROUNDED = "rounded"
    """At least one of them in bfloat16."""
    ALTERED = "altered"
    """The sampler's weights are quantized or noisy."""


MISMATCH_LIMITS_NATS = {
    MismatchClass.EXACT: 2e-3,
    MismatchClass.ROUNDED: 0.03,
    MismatchClass.ALTERED: 0.3,
}
"""Largest mean gap per token that a class explains."""

MIN_TRAJECTORIES = 8
"""Fewer fresh trajectories than this settle nothing."""


class MismatchError(RuntimeError):
    """Sampler and learner do not compute the same policy."""


def audited_gap(lags: Sequence[LagBucket], limit_nats: float) -> float | None:
    """Mean gap per token of a batch's fresh trajectories, nats; None when there are too few.

    lags: the batch by lag (`lag_breakdown`).
    Raises: MismatchError, with what to look at, when the gap is above the limit or no number.
    """
    fresh = next((each for each in lags if each.smallest_lag == 0), None)
    if fresh is None or fresh.count < MIN_TRAJECTORIES:
        return None
    gap = fresh.log_ratio_per_token
    if not gap <= limit_nats:
        raise MismatchError(
            f"sampler and learner differ by {gap:.3g} nats per token on {fresh.count} fresh"
            f" trajectories, at most {limit_nats:g} is to be expected: they do not compute the same"
            " policy. Compare the model's revision, the tokenizer, the temperature, and"
            " `precision`, `quantization` and `noise` of the rollout groups; if the gap is meant to"
            " be, raise `learner.maxMismatchNats`"
        )
    return gap
