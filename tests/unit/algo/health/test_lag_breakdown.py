import math

import pytest

from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.health.lag_breakdown import lag_breakdown


@pytest.mark.parametrize(
    ("lag", "bucket"), [(0, 0), (1, 1), (3, 2), (4, 4), (127, 64), (128, 128), (999, 128)]
)
def test_a_lag_falls_into_the_bucket_that_begins_at_or_below_it(lag, bucket):
    assert lag_breakdown([(lag, 0.0)]) == {bucket: 1.0}


def test_each_bucket_has_its_own_ess_ratio():
    found = lag_breakdown([(2, math.log(3)), (0, 0.0), (3, 0.0), (0, 0.0)])
    assert found == pytest.approx({0: 1.0, 2: 0.8})  # 4^2 / 10 of two
    assert list(found) == [0, 2]


def test_a_bucket_without_weight_has_no_ess():
    assert lag_breakdown([(0, 0.0), (9, -math.inf)]) == {0: 1.0, 8: 0.0}


def test_a_weight_without_a_number_is_refused():
    with pytest.raises(NonFiniteWeightError, match=r"log_weights\[0\]"):
        lag_breakdown([(0, math.nan)])
