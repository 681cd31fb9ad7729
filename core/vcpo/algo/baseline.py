r"""Baselines: the number to subtract from a reward so that the gradient has little variance.

The policy gradient of a group of trajectories with rewards R_i is estimated by

    G(b) = sum_i (R_i - b) h_i,

where h_i is the gradient of trajectory i per unit of advantage, as the estimator uses it: the
truncated weight times the gradient of the aggregated log-probability. If E[h] = 0, no constant b
changes the mean of G. The variance of G per trajectory is, up to a term without b,

    V(b) = E[(R - b)^2 ||h||^2].

It is least at the off-policy optimal baseline (OPOB)

    b* = sum_i n_i R_i / sum_i n_i,        n_i = ||h_i||^2,

a weighted mean of the rewards, whatever the scale of h. For h_i = w_i grad log pi(y_i) the n_i are
w_i^2 ||grad log pi(y_i)||^2, as in the paper.

Two caveats. Truncation makes E[h] differ from 0, so b then shifts the mean of G a little. And b* is
computed from the trajectories that it is applied to, like a group mean; for few trajectories this
is a bias.

Pessimism. E[h] = 0 also fails where the behavior policy does not sample what the policy would: the
data shows a part C < 1 of the policy's probability (`coverage`), and the mean of h_i estimates
grad C (but for the aggregation over tokens). The gradient with a constant b is that of

    sum over what is shown of pi R  +  b (1 - C),

so b is the value that is taken for the rest. The pessimistic baseline takes the least reward:

    b = C b* + (1 - C) min R,

Responses that were seen gain when probability leaves them. With C = 1 it is b*.

Sources: VCPO, arXiv 2602.17616, Eq. 7; derivation Eq. 13. Pessimism in the face of missing data:
arXiv 2012.15085; the form here is this project's.

Departures from the released reference:
- The release measures norms of gradients that contain the weight, and multiplies by w^2 again:
  about w^4 where the paper has w^2. `optimal_baseline` follows the paper.
- The release adds an epsilon of 1e-8 to the denominator, which is large beside small weights: four
  rewards of 1 with w = 1e-3 and gradient norm 10 get b = 0.038, so a group without a signal moves
  the parameters. This module divides the norms by the largest one, and b is 1.
"""

import math
from collections.abc import Sequence
from enum import StrEnum

from vcpo.algo.arrays import Scalar, Vector, vector
from vcpo.algo.ess.importance_weights import NonFiniteWeightError


class Baseline(StrEnum):
    """The number that is subtracted from a reward; `advantages` has the formulas."""

    OPOB = "opob"
    PESSIMISTIC = "pessimistic"
    GROUP_MEAN = "groupMean"
    RLOO = "rloo"
    GRPO = "grpo"
    NONE = "none"


def optimal_baseline(rewards: Vector, squared_norms: Vector) -> float:
    """Return the off-policy optimal baseline, b* = sum_i n_i R_i / sum_i n_i.

    rewards: [n] raw rewards, finite.
    squared_norms: [n] n_i = ||h_i||^2 >= 0. h_i is the gradient per unit of advantage as the
        estimator uses it: it contains the truncated weight and the length aggregation once.
    Returns a value in [min R, max R], whatever the common scale of the norms; the mean reward if
    every norm is 0, because the gradient is then 0 with any baseline.
    Raises: ValueError if empty, if the lengths differ, for a reward that is not finite or a norm
    below 0; NonFiniteWeightError for a norm that is NaN or infinite.
    Source: VCPO, arXiv 2602.17616, Eq. 7.
    """
    rewards, squared_norms = vector(rewards, "rewards"), vector(squared_norms, "squared_norms")
    require_rewards(rewards)
    _require_squared_norms(squared_norms, rewards)
    largest = max(squared_norms)
    if largest == 0.0:
        return mean_baseline(rewards)
    return _weighted_mean(rewards, [squared_norm / largest for squared_norm in squared_norms])


def pessimistic_baseline(rewards: Vector, squared_norms: Vector, coverage: Scalar) -> float:
    """Return the optimal baseline, lowered where data shows a part of the policy only.

    rewards, squared_norms: [n] as for `optimal_baseline`.
    coverage: C, the share of the policy's probability that the data shows, in [0, 1].
    Returns C b* + (1 - C) min R: a value in [min R, b*], and b* itself if C is 1.
    Raises: as `optimal_baseline`; ValueError if the coverage is outside [0, 1].
    """
    rewards, coverage = vector(rewards, "rewards"), float(coverage)
    if not 0.0 <= coverage <= 1.0:
        raise ValueError(f"coverage is {coverage}: a share lies in [0, 1]")
    optimal, least = optimal_baseline(rewards, squared_norms), min(rewards)
    return max(least, optimal - (1.0 - coverage) * (optimal - least))


def mean_baseline(rewards: Vector) -> float:
    """Return the mean reward of the group, which is exactly R if all rewards are R."""
    rewards = vector(rewards, "rewards")
    require_rewards(rewards)
    return _weighted_mean(rewards, [1.0] * len(rewards))


def require_rewards(rewards: Sequence[float]) -> None:
    """Check that there is a reward and that all rewards are finite."""
    if not rewards:
        raise ValueError("rewards is empty: at least one trajectory is needed")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"rewards[{index}] is {reward}: a reward must be a finite number")


def _require_squared_norms(squared_norms: Sequence[float], rewards: Sequence[float]) -> None:
    if len(squared_norms) != len(rewards):
        raise ValueError(
            f"squared_norms has {len(squared_norms)} entries for {len(rewards)} rewards: give one"
            " per trajectory"
        )
    for index, squared_norm in enumerate(squared_norms):
        if not math.isfinite(squared_norm):
            raise NonFiniteWeightError("squared_norms", index, squared_norm)
        if squared_norm < 0.0:
            raise ValueError(f"squared_norms[{index}] is {squared_norm}: a square is at least 0")


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the mean of values under weights in [0, 1], at least one of which is 1.

    The mean is taken of the differences to the first value, so equal values give that value to the
    last bit.
    """
    anchor = values[0]
    lifted = math.fsum(
        weight * (value - anchor) for value, weight in zip(values, weights, strict=True)
    )
    return min(max(anchor + lifted / math.fsum(weights), min(values)), max(values))
