"""The ratio of two medians and its interval, by hand where few values can be drawn."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.results.median_ratio import median_ratio

STEPS = st.lists(st.floats(1.0, 1e3), min_size=1, max_size=12)


def test_equal_seeds_leave_nothing_open():
    found = median_ratio([30.0, 30.0, 30.0], [20.0, 20.0])
    assert (found.ratio, found.low, found.high) == (1.5, 1.5, 1.5)


def test_two_seeds_leave_open_which_of_them_is_typical():
    # Of two draws from 1 and 3 a quarter have the median 1, half 2, and a quarter 3.
    found = median_ratio([1.0, 3.0], [2.0])
    assert (found.ratio, found.low, found.high) == (1.0, 0.5, 1.5)


def test_a_seed_that_never_arrives_may_leave_the_interval_open_above():
    # The median of three draws is 10 or infinite with a chance of 7 of 27 each.
    found = median_ratio([10.0, 20.0, None], [5.0])
    assert (found.ratio, found.low, found.high) == (4.0, 2.0, None)


@pytest.mark.parametrize(
    ("values", "references"),
    [([1.0, None, None], [1.0]), ([1.0], [None]), ([1.0], [0.0])],
    ids=["values never arrive", "references never arrive", "references are there at once"],
)
def test_there_is_no_ratio_without_two_finite_medians_and_a_step(values, references):
    assert median_ratio(values, references) is None


@pytest.mark.parametrize(("values", "references"), [([], [1.0]), ([1.0], [])])
def test_a_side_without_seeds_is_refused(values, references):
    with pytest.raises(ValueError, match="at least one"):
        median_ratio(values, references)


@given(values=STEPS, references=STEPS, factor=st.sampled_from([0.5, 2.0, 8.0]))
def test_the_unit_of_steps_scales_ratio_and_interval(values, references, factor):
    found = median_ratio(values, references)
    scaled = median_ratio([factor * each for each in values], references)
    assert scaled.ratio == factor * found.ratio
    assert (scaled.low, scaled.high) == (factor * found.low, factor * found.high)
    assert min(values) / max(references) <= found.low <= found.high


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says():
    # Ten seeds each of two exponential laws with medians in the proportion 1.5. A share of 300
    # trials scatters by 0.013; a percentile interval of ten values is a little too wide or narrow.
    draws, held = Random(7), 0
    for _ in range(300):
        values = [draws.expovariate(1.0) * 1.5 for _ in range(10)]
        found = median_ratio(values, [draws.expovariate(1.0) for _ in range(10)])
        held += found.low <= 1.5 <= found.high
    assert 0.88 <= held / 300 <= 1.0
