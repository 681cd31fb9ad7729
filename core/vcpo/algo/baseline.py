r"""Baselines: what to subtract from a reward so that the gradient is quiet.

The policy gradient of a group of trajectories with rewards R_i is estimated by

    G(b) = sum_i (R_i - b) h_i,

where h_i is trajectory i's gradient contribution per unit of advantage, as the estimator uses it:
its truncated weight times the gradient of its aggregated log probability. With E[h] = 0 no constant
b changes the mean of G, and its variance per trajectory is, up to a term without b,

    V(b) = E[(R - b)^2 ||h||^2].

Setting dV/db = -2 E[(R - b) ||h||^2] to zero gives the off-policy optimal baseline (OPOB)

    b* = sum_i n_i R_i / sum_i n_i,        n_i = ||h_i||^2,

a weighted mean of the rewards: within [min R, max R], moving along with R, blind to the scale of h.
For h_i = w_i grad log pi(y_i) the n_i are w_i^2 ||grad log pi(y_i)||^2, as in the paper; for a
per-sequence token mean the 1/L_i is in h_i as well. No critic is needed.

Two caveats. Truncation makes E[h] differ from 0, so that b then moves the mean a little; and b* is
taken from the trajectories it is applied to, as a group mean is, which biases it at small counts.

Source: VCPO, arXiv 2602.17616, Eq. 7; derivation Eq. 13.

Departures from the released reference:
- It measures norms of gradients that hold the weight already and then multiplies by w^2 again:
  about w^4 where the paper has w^2. `optimal_baseline` follows the paper, `published_baseline` the
  release (without its factor L_i^2, which the caller may put into the squared norms).
- It adds an epsilon of 1e-8 to the denominator, which is not small beside small weights: four
  rewards of 1 with w = 1e-3 and gradient norm 10 get b = 0.038 there, so that a group with nothing
  to learn from moves the parameters. Here the norms are divided by their largest, and b is 1.
"""

import math
from collections.abc import Sequence
from enum import StrEnum

from vcpo.algo.arrays import Vector, vector
from vcpo.algo.ess.importance_weights import NonFiniteWeightError, require_log_weights


class Baseline(StrEnum):
    """What a reward is measured against."""

    OPOB = "opob"
    GROUP_MEAN = "groupMean"
    RLOO = "rloo"
    GRPO = "grpo"
    PUBLISHED = "published"
    NONE = "none"


class GradientNormEstimator(StrEnum):
    """Where a baseline that weighs by n_i = ||h_i||^2 has the n_i from.

    b* is blind to a common factor, so a proxy need not be a norm: it should be proportional to it.
    """

    EXACT = "exact"
    """The gradient of all trainable parameters."""
    LM_HEAD = "lmHead"
    """The gradient of the output head alone."""
    LOGIT_ENERGY = "logitEnergy"
    """sum_t a_t^2 ||grad_logits log pi(y_t)||^2: from the forward pass."""
    LENGTH = "length"
    """sum_t a_t^2: as if all tokens' gradients were equally long and uncorrelated."""


def optimal_baseline(rewards: Vector, squared_norms: Vector) -> float:
    """Off-policy optimal baseline, b* = sum_i n_i R_i / sum_i n_i.

    rewards: [n] raw rewards, finite.
    squared_norms: [n] n_i = ||h_i||^2 >= 0, with h_i the gradient contribution per unit of
        advantage as the estimator uses it: truncated weight and length aggregation inside, once.
    Returns a value in [min R, max R], whatever the common scale of the norms. When every norm is
    zero it is the mean reward; the contribution is then zero with any baseline.
    Raises: ValueError when empty, when the lengths differ, at a reward that is not finite or a
    norm below 0; NonFiniteWeightError at a norm that is NaN or infinite.
    Source: VCPO, arXiv 2602.17616, Eq. 7.
    """
    rewards, squared_norms = vector(rewards, "rewards"), vector(squared_norms, "squared_norms")
    require_rewards(rewards)
    _require_squared_norms(squared_norms, rewards)
    largest = max(squared_norms)
    if largest == 0.0:
        return mean_baseline(rewards)
    return _weighted_mean(rewards, [squared_norm / largest for squared_norm in squared_norms])


def published_baseline(rewards: Vector, squared_norms: Vector, log_weights: Vector) -> float:
    """Baseline of the released reference, which counts the weight twice; for comparison only.

    b = sum_i w_i^2 n_i R_i / sum_i w_i^2 n_i, where n_i holds the truncated weight already.
    rewards, squared_norms: [n] as for `optimal_baseline`.
    log_weights: [n] untruncated, nats; multiplied in log space, so that no size overflows.
    Returns a value in [min R, max R]; the mean reward when every product is zero.
    Raises: as `optimal_baseline`, and at log weights as `effective_sample_size` does, except that
    they may all be -inf.
    Source: mit-han-lab/vcpo, compute_opob_baseline with use_is_weights (the default).
    """
    rewards, squared_norms = vector(rewards, "rewards"), vector(squared_norms, "squared_norms")
    log_weights = vector(log_weights, "log_weights")
    require_rewards(rewards)
    _require_squared_norms(squared_norms, rewards)
    _require_length("log_weights", log_weights, rewards)
    require_log_weights(log_weights)
    log_terms = [
        2.0 * log_weight + math.log(squared_norm) if squared_norm > 0.0 else -math.inf
        for log_weight, squared_norm in zip(log_weights, squared_norms, strict=True)
    ]
    largest = max(log_terms)
    if largest == -math.inf:
        return mean_baseline(rewards)
    return _weighted_mean(rewards, [math.exp(log_term - largest) for log_term in log_terms])


def mean_baseline(rewards: Vector) -> float:
    """Mean reward of the group, exactly R when all rewards are R.

    Raises: ValueError when empty or at a reward that is not finite.
    """
    rewards = vector(rewards, "rewards")
    require_rewards(rewards)
    return _weighted_mean(rewards, [1.0] * len(rewards))


def require_rewards(rewards: Sequence[float]) -> None:
    """Refuse an empty group and rewards that are not finite, with a ValueError."""
    if not rewards:
        raise ValueError("rewards is empty: at least one trajectory is needed")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"rewards[{index}] is {reward}: a reward must be a finite number")


def _require_length(name: str, values: Sequence[float], rewards: Sequence[float]) -> None:
    if len(values) != len(rewards):
        raise ValueError(
            f"{name} has {len(values)} entries for {len(rewards)} rewards: give one per trajectory"
        )


def _require_squared_norms(squared_norms: Sequence[float], rewards: Sequence[float]) -> None:
    _require_length("squared_norms", squared_norms, rewards)
    for index, squared_norm in enumerate(squared_norms):
        if not math.isfinite(squared_norm):
            raise NonFiniteWeightError("squared_norms", index, squared_norm)
        if squared_norm < 0.0:
            raise ValueError(f"squared_norms[{index}] is {squared_norm}: a square is at least 0")


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Mean of values under weights in [0, 1] of which one is 1.

    The first value is taken out and put back, so that equal values come back to the last bit.
    """
    anchor = values[0]
    lifted = math.fsum(
        weight * (value - anchor) for value, weight in zip(values, weights, strict=True)
    )
    return min(max(anchor + lifted / math.fsum(weights), min(values)), max(values))
