"""Distribution of a batch's ESS and weight over the lags of its trajectories.

The buckets are lags in policy versions: 0, 1, 2-3, 4-7, .., 64-127, and 128 and above. The ESS of a
bucket shows the spread of its weights. Its share of the weight, compared with its share of the
trajectories, shows how much of the estimate comes from it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from vcpo.algo.ess.moments import WeightMoments

LAG_BUCKETS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Smallest lag of each bucket, in policy versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaggedTrajectory:
    """The numbers of one trajectory that the breakdown needs."""

    lag: int
    """Lag of the trajectory's oldest token, in policy versions, at least 0."""

    log_weight: float
    """Log importance weight, nats, untruncated; -inf is a weight of 0."""

    num_tokens: int
    """Trained tokens, at least 1."""

    absolute_log_ratio: float
    """Sum over the trained tokens of |log pi - log mu|, nats."""

    def __post_init__(self) -> None:
        if self.lag < 0 or self.num_tokens < 1:
            raise ValueError(
                f"lag is {self.lag} and num_tokens {self.num_tokens}: give at least 0 and 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LagBucket:
    """The trajectories of a batch whose lags lie in one bucket."""

    smallest_lag: int
    """Smallest lag of the bucket, one of `LAG_BUCKETS`."""

    count: int
    """Number of trajectories, at least 1."""

    ess: float
    """Effective sample size of the bucket alone, in [1, count]; 0 if every weight is 0."""

    log_ratio_per_token: float
    """Mean over tokens of |log pi - log mu|, nats."""

    weight_share: float
    """Share of the whole batch's weight, in [0, 1]."""


def lag_breakdown(batch: Sequence[LaggedTrajectory]) -> tuple[LagBucket, ...]:
    """Return the non-empty buckets of a batch, smallest lag first.

    Raises: ValueError if empty; NonFiniteWeightError for a NaN or +inf.
    """
    total = WeightMoments.of([each.log_weight for each in batch])
    return tuple(
        _bucket(smallest, list(members), total.log_sum)
        for smallest, members in groupby(sorted(batch, key=bucket_of), bucket_of)
    )


def bucket_of(trajectory: LaggedTrajectory) -> int:
    """Return the smallest lag of a trajectory's bucket."""
    return max(smallest for smallest in LAG_BUCKETS if smallest <= trajectory.lag)


def _bucket(smallest_lag: int, members: Sequence[LaggedTrajectory], log_total: float) -> LagBucket:
    moments = WeightMoments.of([each.log_weight for each in members])
    is_empty = moments.log_sum == -math.inf
    return LagBucket(
        smallest_lag=smallest_lag,
        count=len(members),
        ess=0.0 if is_empty else moments.ess,
        log_ratio_per_token=math.fsum(each.absolute_log_ratio for each in members)
        / sum(each.num_tokens for each in members),
        weight_share=0.0 if is_empty else min(1.0, math.exp(moments.log_sum - log_total)),
    )
