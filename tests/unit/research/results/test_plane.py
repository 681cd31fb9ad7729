"""Points of the plane and safe rates, worked by hand for a target of 0.5."""

from __future__ import annotations

import math

import pytest

from research.results.plane import plane_points, safe_rates
from tests.fixtures.study import record

RATES = (1e-4, 1e-3, 1e-2)


def curve(*finals, method="vcpo", lag=32, seed=1):
    return [
        record(method, lag, [final], seed=seed, learning_rate=rate)
        for rate, final in zip(RATES, finals, strict=False)
    ]


def judged(*records, own=0.5):
    """Safe rates of records whose steps were taken at half of the requested rate."""
    return safe_rates(
        records,
        RATES,
        0.5,
        own_targets={"vcpo": own},
        taken_rate=lambda record: record.learning_rate / 2,
    )


def widths(*records):
    return [each.decades for each in judged(*records)]


def test_a_point_is_about_all_seeds_of_a_method_at_a_lag_and_a_rate():
    records = [record(accuracies=[0.8], seed=1), record(accuracies=[0.6], seed=2)]
    (point,) = plane_points(records)
    assert (point.method, point.lag, point.learning_rate, point.num_seeds) == ("vcpo", 0, 1e-4, 2)
    assert point.final_accuracy_mean == pytest.approx(0.7)
    assert point.final_accuracy_std == pytest.approx(math.sqrt(0.02))


def test_one_seed_has_no_spread():
    (point,) = plane_points([record()])
    assert point.final_accuracy_std == 0.0


def test_the_mean_over_seeds_decides_which_rates_are_safe():
    # Means 0.3, 0.7 and 0.1: half a decade below 1e-3 and a third above.
    first, second = curve(0.3, 0.9, 0.1), curve(0.3, 0.5, 0.1, seed=2)
    (found,) = judged(*first, *second)
    assert found.decades == pytest.approx(0.5 + 1 / 3)
    # Alone the seeds are safe for 2/3 + 1/2 decades, and nowhere but at 1e-3 itself.
    assert found.seed_decades == pytest.approx((0.0, 2 / 3 + 0.5))


def test_each_method_and_lag_has_its_own_safe_rates():
    assert widths(*curve(0.9, 0.9, 0.9), *curve(0.5, 0.0, 0.0, lag=2)) == pytest.approx([2.0, 0.0])


def test_no_safe_rate_is_no_decade_and_no_range():
    (found,) = judged(*curve(0.1, 0.2, 0.1))
    assert (found.decades, found.range, found.seed_decades) == (0.0, None, (0.0,))
    assert found.taken is None


def test_a_method_of_which_a_rate_was_not_run_yet_is_not_judged():
    assert widths(*curve(0.9, 0.9)) == []


def test_a_seed_that_lacks_a_rate_has_no_width_of_its_own():
    (found,) = judged(*curve(0.9, 0.9, 0.9), *curve(0.9, 0.9, seed=2))
    assert found.seed_decades == pytest.approx((2.0,))


def test_the_own_target_of_a_method_is_beside_the_common_one():
    # From 0.3 at 1e-4 on, and from 0.7 at 1e-3 down to 0.2 of the 0.1 at 1e-2.
    (found,) = judged(*curve(0.3, 0.7, 0.1), own=0.2)
    assert found.own_decades == pytest.approx(1 + 5 / 6)


def test_the_rates_taken_are_those_of_the_requested_rates_that_reach_the_target():
    (found,) = judged(*curve(0.9, 0.5, 0.1), *curve(0.7, 0.5, 0.1, seed=2))
    assert found.taken == (0.5e-4, 0.5e-3)
