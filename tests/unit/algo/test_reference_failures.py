"""What goes wrong in the released reference, each as a number that must come out right here.

The release exponentiates weights in float32, adds 1e-8 to denominators, and takes min(1, ratio)
of a ratio that may be NaN, which in Python is 1.
"""

import math

import pytest

from vcpo.algo.advantage import advantages
from vcpo.algo.baseline import Baseline, optimal_baseline
from vcpo.algo.ess.importance_weights import NonFiniteWeightError, ess_ratio
from vcpo.algo.ess.learning_rate import learning_rate_scale

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
MEASURED = [0.4, -0.7, 1.1, 0.2, -1.3, 0.0, 0.9, -0.2]


def test_one_weight_beyond_float32_brakes_the_step_instead_of_freeing_it() -> None:
    log_weights = [89.0, 0.0, 0.0, 0.0]
    assert math.exp(89.0) > FLOAT32_MAX
    assert learning_rate_scale(ess_ratio(log_weights)) == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize("log_weight", [math.nan, math.inf], ids=str)
def test_a_weight_that_is_no_number_never_gets_a_rate(log_weight: float) -> None:
    with pytest.raises(NonFiniteWeightError):
        learning_rate_scale(ess_ratio([0.0, log_weight]))
    with pytest.raises(ValueError, match="ess_ratio is nan"):
        learning_rate_scale(math.nan)


@pytest.mark.parametrize("shift", [-16.0, 700.0], ids=str)
def test_a_drift_common_to_all_weights_is_not_taken_for_a_collapse(shift: float) -> None:
    drifted = [log_weight + shift for log_weight in MEASURED]
    assert ess_ratio(drifted) == pytest.approx(ess_ratio(MEASURED), rel=1e-10)
    assert learning_rate_scale(ess_ratio(drifted)) > 0.7


def test_the_epsilon_of_the_release_takes_a_drift_for_a_collapse() -> None:
    weights = [math.exp(log_weight - 16.0) for log_weight in MEASURED]
    with_epsilon = sum(weights) ** 2 / (sum(w * w for w in weights) + 1e-8) / len(weights)
    assert with_epsilon < 1e-3 < ess_ratio([log_weight - 16.0 for log_weight in MEASURED])


def test_small_weights_leak_no_gradient_out_of_a_group_that_is_all_right() -> None:
    squared_norms = [(1e-3 * 10.0) ** 2] * 4
    assert optimal_baseline([1.0] * 4, squared_norms) == 1.0
    assert advantages([1.0] * 4, Baseline.OPOB, squared_norms) == [0.0] * 4
