"""ESS ratio of a batch by the lag of its trajectories.

The buckets are lags in policy versions: 0, 1, 2-3, 4-7, .., 64-127, and 128 and above.
"""

import math
from collections.abc import Iterable
from typing import Final

from vcpo.algo.ess.moments import WeightMoments

LAG_BUCKETS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Smallest lag of each bucket, in policy versions."""


def lag_breakdown(batch: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the ESS ratio of each bucket that is not empty, by its smallest lag, ascending.

    batch: lag of a trajectory's oldest token, at least 0 versions, and its log importance weight,
        nats, untruncated; -inf is a weight of 0. A bucket without any weight has a ratio of 0.
    Raises: NonFiniteWeightError for a NaN or +inf.
    """
    buckets: dict[int, list[float]] = {}
    for lag, log_weight in batch:
        smallest = max(each for each in LAG_BUCKETS if each <= lag)
        buckets.setdefault(smallest, []).append(log_weight)
    moments = {lag: WeightMoments.of(buckets[lag]) for lag in sorted(buckets)}
    return {
        lag: 0.0 if each.log_sum == -math.inf else each.ess_ratio for lag, each in moments.items()
    }
