import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.health.lag_breakdown import LaggedTrajectory, lag_breakdown


def trajectory(lag, weight, num_tokens=10, absolute=0.0):
    log_weight = math.log(weight) if weight else -math.inf
    return LaggedTrajectory(
        lag=lag, log_weight=log_weight, num_tokens=num_tokens, absolute_log_ratio=absolute
    )


@pytest.mark.parametrize(
    ("lag", "bucket"), [(0, 0), (1, 1), (3, 2), (4, 4), (127, 64), (128, 128), (999, 128)]
)
def test_a_lag_falls_into_the_bucket_that_begins_at_or_below_it(lag, bucket):
    (found,) = lag_breakdown([trajectory(lag, 1)])
    assert found.smallest_lag == bucket


def test_each_bucket_has_its_own_ess_and_share():
    batch = [trajectory(2, 3), trajectory(0, 1), trajectory(3, 1), trajectory(0, 1)]
    fresh, stale = lag_breakdown(batch)
    assert (fresh.count, fresh.ess) == (2, pytest.approx(2.0))
    assert (stale.count, stale.ess) == (2, pytest.approx(1.6))  # 4^2 / 10
    assert (fresh.weight_share, stale.weight_share) == pytest.approx((1 / 3, 2 / 3))


def test_the_log_ratio_is_a_mean_over_tokens():
    (found,) = lag_breakdown([trajectory(5, 1, 10, 1.0), trajectory(6, 1, 30, 5.0)])
    assert found.log_ratio_per_token == pytest.approx(0.15)


def test_a_bucket_without_weight_has_no_ess():
    fresh, stale = lag_breakdown([trajectory(0, 1), trajectory(9, 0)])
    assert (stale.ess, stale.weight_share) == (0.0, 0.0)
    assert fresh.weight_share == 1.0


@given(st.lists(st.tuples(st.integers(0, 300), st.floats(0.01, 100)), min_size=1, max_size=20))
def test_buckets_hold_every_trajectory_and_all_the_weight(rows):
    buckets = lag_breakdown([trajectory(lag, weight) for lag, weight in rows])
    assert sum(bucket.count for bucket in buckets) == len(rows)
    assert math.fsum(bucket.weight_share for bucket in buckets) == pytest.approx(1.0)


def test_a_weight_without_a_number_is_named():
    bad = LaggedTrajectory(lag=0, log_weight=math.nan, num_tokens=1, absolute_log_ratio=0.0)
    with pytest.raises(NonFiniteWeightError, match=r"log_weights\[1\]"):
        lag_breakdown([trajectory(0, 1), bad])


@pytest.mark.parametrize("wrong", [{"lag": -1}, {"num_tokens": 0}], ids=str)
def test_an_impossible_trajectory_is_refused(wrong):
    values = {"lag": 0, "log_weight": 0.0, "num_tokens": 1, "absolute_log_ratio": 0.0}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LaggedTrajectory(**values | wrong)
