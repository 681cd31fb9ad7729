import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.coverage import on_policy_mean_weight, policy_coverage
from vcpo.algo.ess.importance_weights import NonFiniteWeightError

log_weights = st.lists(st.floats(-50, 50), min_size=1, max_size=32)


def test_the_coverage_is_the_mean_weight() -> None:
    # (1/2 + 1 + 1/4 + 1/4) / 4
    assert policy_coverage([math.log(w) for w in (0.5, 1, 0.25, 0.25)], 8) == pytest.approx(0.5)


def test_weights_count_up_to_the_cap() -> None:
    # (2 + 0 + 0 + 0) / 4 with a cap of 2
    assert policy_coverage([50.0, -math.inf, -800.0, -math.inf], 2) == pytest.approx(0.5)


def test_data_never_shows_more_than_the_whole_policy() -> None:
    assert policy_coverage([1.0, 1.0], 8) == 1.0


def test_what_the_mismatch_takes_does_not_count_as_missing() -> None:
    assert policy_coverage([math.log(0.6)] * 4, 8, on_policy_mean=0.8) == pytest.approx(0.75)


@given(log_weights, st.floats(1, 100))
def test_the_coverage_is_a_share(logs: list[float], cap: float) -> None:
    assert 0.0 <= policy_coverage(logs, cap) <= 1.0


@given(log_weights, st.floats(0, 20))
def test_probability_that_leaves_the_data_lowers_the_coverage(
    logs: list[float], nats: float
) -> None:
    assert policy_coverage([log - nats for log in logs], 8) <= policy_coverage(logs, 8)


def test_a_weight_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(NonFiniteWeightError, match=r"log_weights\[1\]"):
        policy_coverage([0.0, math.nan], 8)


@pytest.mark.parametrize(
    ("cap", "mean", "message"),
    [(0.0, 1.0, "cap is"), (math.inf, 1.0, "cap is"), (8.0, 0.0, "on_policy_mean is")],
)
def test_numbers_out_of_range_are_refused(cap: float, mean: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_coverage([0.0], cap, mean)


def test_without_mismatch_every_weight_is_one() -> None:
    assert on_policy_mean_weight([0.0, 0.0], 8) == 1.0


@pytest.mark.parametrize("variance", [0.5, 2.0, 8.0])
def test_the_mean_truncated_weight_is_that_of_drawn_weights(variance: float) -> None:
    drawn = random.Random(7)
    deviation = math.sqrt(variance)
    weights = [math.exp(drawn.gauss(-variance / 2, deviation)) for _ in range(400_000)]
    # A standard error of at most 0.0025: the truncated weights have a deviation below 1.6.
    expected = fmean(min(weight, 8.0) for weight in weights)
    assert on_policy_mean_weight([variance], 8) == pytest.approx(expected, abs=0.01)


def test_a_batch_has_the_mean_of_its_lengths() -> None:
    short, long = on_policy_mean_weight([1.0], 8), on_policy_mean_weight([6.0], 8)
    assert on_policy_mean_weight([1.0, 6.0], 8) == pytest.approx((short + long) / 2)


@given(st.floats(0, 1e9), st.floats(1, 1e6))
def test_truncation_only_takes(variance: float, cap: float) -> None:
    assert 0.0 < on_policy_mean_weight([variance], cap) <= 1.0


@pytest.mark.parametrize(
    ("variances", "cap", "message"),
    [([], 8.0, "variances is empty"), ([-1.0], 8.0, "a variance is"), ([1.0], 0.5, "cap is")],
)
def test_a_variance_or_cap_that_cannot_be_is_refused(
    variances: list[float], cap: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        on_policy_mean_weight(variances, cap)
