import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.ess.moments import WeightMoments

LOG_WEIGHTS = st.lists(st.floats(-50, 50), min_size=1, max_size=20)


def test_the_ess_of_four_weights_is_that_of_their_sums():
    # Weights 1, 1/2, 2, 4: 7.5^2 / 21.25
    moments = WeightMoments.of([math.log(weight) for weight in (1, 0.5, 2, 4)])
    assert moments.ess == pytest.approx(56.25 / 21.25, rel=1e-12)
    assert moments.ess_ratio == pytest.approx(56.25 / 85, rel=1e-12)


@given(LOG_WEIGHTS, st.floats(-1e4, 1e4))
def test_a_common_factor_changes_no_ess(log_weights, shift):
    shifted = WeightMoments.of([each + shift for each in log_weights])
    assert shifted.ess == pytest.approx(WeightMoments.of(log_weights).ess, rel=1e-8)


def test_weights_of_zero_count_without_weight():
    assert WeightMoments.of([0.0, -math.inf]).ess_ratio == 0.5


def test_an_ess_of_nothing_but_zeros_has_no_value():
    with pytest.raises(NonFiniteWeightError, match="log_sum is -inf"):
        _ = WeightMoments.of([-math.inf]).ess


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_sum_that_is_no_number_is_refused(value):
    with pytest.raises(NonFiniteWeightError, match="log_sum is"):
        WeightMoments(count=1, log_sum=value, log_sum_squares=0.0)
