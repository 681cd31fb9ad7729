import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.health.diagnostics import (
    TokenSums,
    diagnose,
    k3,
    top_gradient_share,
    truncated_logs,
)

LOG_1_2_4 = [math.log(weight) for weight in (1, 0.5, 2, 4)]


def diagnosis(**changes):
    values = {
        "log_weights": LOG_1_2_4,
        "tokens": TokenSums.of([0.0, math.log(3)]),
        "advantages": [[0.5, -0.5], [0.25, -0.75]],
        "cap": 2.0,
    }
    return diagnose(**values | changes)


def test_truncation_hides_what_is_lost():
    # 7.5^2 / (4 * 21.25) and, with the 4 cut to 2, 5.5^2 / (4 * 9.25)
    found = diagnosis()
    assert found.ess_ratio == pytest.approx(56.25 / 85, rel=1e-12)
    assert found.truncated_ess_ratio == pytest.approx(30.25 / 37, rel=1e-12)


def test_tokens_have_ratios_of_their_own():
    # Ratios 1 and 3: 16 / 20
    found = diagnosis()
    assert found.token_ess_ratio == pytest.approx(0.8, rel=1e-12)


def test_the_divergence_is_a_mean_over_tokens():
    assert diagnosis().kl_per_token == pytest.approx((0.0 + 3 - 1 - math.log(3)) / 2)


def test_concentration_is_the_largest_weight_over_their_sum():
    # Weights 1, 1/2, 2, 4
    assert diagnosis().weight_concentration == pytest.approx(4 / 7.5, rel=1e-12)
    assert diagnosis(log_weights=[900.0, 0.0]).weight_concentration == 1.0


def test_the_baselines_weights_are_squared_norms_within_a_group():
    # Squared norms 9, 16 and 0, 0: the second group has no gradient and does not count.
    found = diagnosis(gradient_norms=[3.0, 4.0, 0.0, 0.0])
    assert found.baseline_weight_concentration == pytest.approx(16 / 25, rel=1e-12)
    # Squared norms 9, 16 and 1, 1: the mean of 16/25 and 1/2.
    found = diagnosis(gradient_norms=[3.0, 4.0, 1.0, 1.0])
    assert found.baseline_weight_concentration == pytest.approx(0.57, rel=1e-12)


def test_norms_belong_to_the_trajectories_of_the_groups():
    with pytest.raises(ValueError, match="gradient_norms has 3 entries and the groups 4"):
        diagnosis(gradient_norms=[1.0, 1.0, 1.0])


def test_two_of_two_hundred_are_the_top_percent():
    assert top_gradient_share([1.0] * 198 + [51.0] * 2, [1.0] * 200) == pytest.approx(0.34)


def test_no_gradient_has_no_top():
    assert top_gradient_share([1.0, 2.0], [0.0, 0.0]) == 0.0


def test_norms_and_coefficients_go_in_pairs():
    with pytest.raises(ValueError, match="gradient_norms has 2 entries and coefficients 1"):
        top_gradient_share([1.0, 2.0], [1.0])


@given(st.floats(-1e4, 1e4))
def test_no_token_lowers_the_divergence_or_overflows_it(log_ratio):
    assert 0.0 <= k3(log_ratio) < math.exp(20)


@pytest.mark.parametrize("cap", [0.0, math.inf, math.nan], ids=str)
def test_a_cap_out_of_range_is_refused(cap):
    with pytest.raises(ValueError, match="cap is"):
        truncated_logs([0.0], cap)


def test_a_weight_that_is_no_number_does_not_hide_under_the_cap():
    with pytest.raises(NonFiniteWeightError, match=r"log_weights\[0\]"):
        truncated_logs([math.inf], 8.0)


def test_advantages_have_percentiles_over_all_groups():
    # 0, 0.05, ..., 1 in two groups of unequal size, in any order: one of 20 gaps is 5 %
    values = [number / 20 for number in range(21)]
    found = diagnosis(
        advantages=[values[::-2], values[1::2]],
        log_weights=[0.0] * 21,
    )
    assert (found.advantage_p05, found.advantage_p95) == (0.05, 0.95)
