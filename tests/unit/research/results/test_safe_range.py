"""Safe ranges of a curve over the rates 1e-5, 1e-4, 1e-3 and 1e-2, for a target of 0.5."""

from __future__ import annotations

import pytest

from research.results.safe_range import safe_range

RATES = (1e-5, 1e-4, 1e-3, 1e-2)


def found(*accuracies):
    return safe_range(list(zip(RATES, accuracies, strict=False)), 0.5)


def test_the_target_is_met_on_the_line_between_two_rates():
    # From 0.3 to 0.7 half of the decade from 1e-5 to 1e-4; from 0.7 to 0.1 a third of the next.
    safe = found(0.3, 0.7, 0.1, 0.0)
    assert (safe.low, safe.high) == pytest.approx((10**-4.5, 10 ** (-4 + 1 / 3)))
    assert safe.decades == pytest.approx(0.5 + 1 / 3)
    assert not safe.is_cut


def test_neighbors_that_reach_the_target_are_one_range():
    assert found(0.1, 0.5, 0.9, 0.1).decades == pytest.approx(1.5)


def test_the_widest_of_several_ranges_counts():
    # 1e-5 alone is safe for 0.2 decades, 1e-3 with its neighbors for 0.5 + 1.
    safe = found(0.6, 0.1, 0.9, 0.9)
    assert safe.decades == pytest.approx(1.5)
    assert safe.high == pytest.approx(1e-2)


def test_of_equally_wide_ranges_the_one_at_low_rates_is_taken():
    assert found(0.5, 0.0, 0.0, 0.5).low == pytest.approx(1e-5)


@pytest.mark.parametrize("accuracies", [(0.9, 0.1), (0.1, 0.9), (0.9, 0.9, 0.9, 0.9)])
def test_a_range_that_reaches_an_end_of_the_rates_is_cut(accuracies):
    assert found(*accuracies).is_cut


def test_all_rates_are_as_wide_as_the_rates_tried():
    assert found(0.9, 0.9, 0.9, 0.9).decades == pytest.approx(3.0)


@pytest.mark.parametrize("accuracies", [(), (0.4, 0.49, 0.3, 0.0)])
def test_without_a_rate_that_reaches_the_target_there_is_no_range(accuracies):
    assert found(*accuracies) is None
