r"""Baselines: the number to subtract from a reward so that the gradient has little variance.

The policy gradient of a group of trajectories with rewards R_i is estimated by

    G(b) = sum_i (R_i - b) h_i,

where h_i is the gradient of trajectory i per unit of advantage, as the estimator uses it: the
truncated weight times the gradient of the aggregated log-probability. If E[h] = 0, no constant b
changes the mean of G. The variance of G per trajectory is, up to a term without b,

    V(b) = E[(R - b)^2 ||h||^2].

Setting dV/db = -2 E[(R - b) ||h||^2] to zero gives the off-policy optimal baseline (OPOB)

    b* = sum_i n_i R_i / sum_i n_i,        n_i = ||h_i||^2,

a weighted mean of the rewards. It lies in [min R, max R], shifts with R, and does not depend on the
scale of h. For h_i = w_i grad log pi(y_i) the n_i are w_i^2 ||grad log pi(y_i)||^2, as in the
paper. For a per-sequence token mean, h_i contains the factor 1/L_i as well. No critic is needed.

Two caveats. Truncation makes E[h] differ from 0, so b then shifts the mean of G a little. And b* is
computed from the trajectories that it is applied to, like a group mean; for few trajectories this
is a bias. `left_out_baselines` gives each trajectory the b* of the others, which is free of it and
estimated from one trajectory less.

Pessimism. E[h] = 0 also fails where the behavior policy does not sample what the policy would: the
data shows a part C < 1 of the policy's probability (`coverage`), and the mean of h_i estimates
grad C (but for the aggregation over tokens). The gradient with a constant b is that of

    sum over what is shown of pi R  +  b (1 - C),

so b is the value that is taken for the rest. b* takes the rest for as good as what is known, and
nothing holds the policy where its data is. The pessimistic baseline takes the least reward for it,

    b = C b* + (1 - C) min R,

the expected reward if what is not shown is worth the least. So responses that were seen gain when
probability leaves them, and the more has left, the more they gain. With C = 1 it is b*. Offline
reinforcement learning calls this principle pessimism.

Sources: VCPO, arXiv 2602.17616, Eq. 7; derivation Eq. 13. Pessimism in the face of missing data:
arXiv 2012.15085; the form here is this project's.

Departures from the released reference:
- The release measures norms of gradients that contain the weight, and multiplies by w^2 again:
  about w^4 where the paper has w^2. `optimal_baseline` follows the paper, `published_baseline` the
  release (without its factor L_i^2, which the caller may put into the squared norms).
- The release adds an epsilon of 1e-8 to the denominator, which is large beside small weights: four
  rewards of 1 with w = 1e-3 and gradient norm 10 get b = 0.038, so a group without a signal moves
  the parameters. This module divides the norms by the largest one, and b is 1.
"""

import math
from collections.abc import Sequence
from enum import StrEnum

from vcpo.algo.arrays import Scalar, Vector, vector
from vcpo.algo.ess.importance_weights import NonFiniteWeightError, require_log_weights


class Baseline(StrEnum):
    """The number that is subtracted from a reward; `advantages` has the formulas."""

    OPOB = "opob"
    OPOB_LEAVE_ONE_OUT = "opobLeaveOneOut"
    PESSIMISTIC = "pessimistic"
    GROUP_MEAN = "groupMean"
    RLOO = "rloo"
    GRPO = "grpo"
    PUBLISHED = "published"
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


def left_out_baselines(rewards: Vector, squared_norms: Vector) -> list[float]:
    """Return for each trajectory the optimal baseline of the others.

    rewards, squared_norms: [n] as for `optimal_baseline`, n at least 2.
    Returns [n] values in [min R, max R]: R_i - b_i = (R_i - b*) / (1 - n_i / sum_j n_j), computed
    from the others, so that a trajectory with all of the norm has a finite one.
    Raises: as `optimal_baseline`; ValueError for fewer than two trajectories.
    """
    rewards, squared_norms = vector(rewards, "rewards"), vector(squared_norms, "squared_norms")
    require_rewards(rewards)
    _require_squared_norms(squared_norms, rewards)
    if len(rewards) < 2:
        raise ValueError("rewards has 1 entry: a baseline of the others needs at least 2")
    return [
        optimal_baseline(
            rewards[:index] + rewards[index + 1 :],
            squared_norms[:index] + squared_norms[index + 1 :],
        )
        for index in range(len(rewards))
    ]


def pessimistic_baseline(rewards: Vector, squared_norms: Vector, coverage: Scalar) -> float:
    """Return the optimal baseline, lowered where data shows a part of the policy only.

    rewards, squared_norms: [n] as for `optimal_baseline`.
    coverage: C, the share of the policy's probability that the data shows, in [0, 1].
    Returns C b* + (1 - C) min R: a value in [min R, b*], and b* itself if C is 1.
    Raises: as `optimal_baseline`; ValueError if the coverage is outside [0, 1].
    """
    rewards = vector(rewards, "rewards")
    return lowered_baseline(optimal_baseline(rewards, squared_norms), min(rewards), coverage)


def lowered_baseline(baseline: float, least_reward: float, coverage: Scalar) -> float:
    """Return a baseline that takes what the data does not show to be worth the least reward.

    baseline: at least `least_reward`. coverage: C in [0, 1].
    Returns C baseline + (1 - C) least_reward, and the baseline itself if C is 1.
    Raises: ValueError if the coverage is outside [0, 1].
    """
    coverage = float(coverage)
    if not 0.0 <= coverage <= 1.0:
        raise ValueError(f"coverage is {coverage}: a share lies in [0, 1]")
    return max(least_reward, baseline - (1.0 - coverage) * (baseline - least_reward))


def published_baseline(rewards: Vector, squared_norms: Vector, log_weights: Vector) -> float:
    """Return the baseline of the released reference, which counts the weight twice.

    For comparison only. b = sum_i w_i^2 n_i R_i / sum_i w_i^2 n_i, where n_i already contains the
    truncated weight.
    rewards, squared_norms: [n] as for `optimal_baseline`.
    log_weights: [n] nats, untruncated; the products are taken in log space and do not overflow.
    Returns a value in [min R, max R]; the mean reward if every product is 0.
    Raises: as `optimal_baseline`, and for log weights as `effective_sample_size`, except that all
    of them may be -inf.
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
    """Return the mean reward of the group, which is exactly R if all rewards are R.

    Raises: ValueError if empty or for a reward that is not finite.
    """
    rewards = vector(rewards, "rewards")
    require_rewards(rewards)
    return _weighted_mean(rewards, [1.0] * len(rewards))


def require_rewards(rewards: Sequence[float]) -> None:
    """Check that there is a reward and that all rewards are finite.

    Raises: ValueError naming the first reward that is not.
    """
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
    """Return the mean of values under weights in [0, 1], at least one of which is 1.

    The mean is taken of the differences to the first value, so equal values give that value to the
    last bit.
    """
    anchor = values[0]
    lifted = math.fsum(
        weight * (value - anchor) for value, weight in zip(values, weights, strict=True)
    )
    return min(max(anchor + lifted / math.fsum(weights), min(values)), max(values))
