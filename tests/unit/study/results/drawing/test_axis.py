import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo_study.results.drawing.axis import Axis, round_ticks, widen


@pytest.mark.parametrize(
    ("low", "high", "about", "ticks"),
    [
        (0.0, 1.0, 5, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (0.0, 0.3, 3, (0.0, 0.1, 0.2, 0.3)),
        (1.0, 400.0, 7, (100.0, 200.0, 300.0, 400.0)),
        (-0.7, 0.7, 3, (-0.5, 0.0, 0.5)),
        (0.0, 3e-4, 3, (0.0, 1e-4, 2e-4, 3e-4)),
    ],
)
def test_ticks_are_round_numbers(low, high, about, ticks):
    assert round_ticks(low, high, about=about) == ticks


def test_whole_ticks_do_not_split_a_step():
    assert round_ticks(0.0, 3.0, about=10, whole=True) == (0.0, 1.0, 2.0, 3.0)


@given(
    low=st.floats(-1e6, 1e6),
    span=st.floats(1e-3, 1e6),
    about=st.integers(2, 12),
)
def test_ticks_lie_within_the_range_and_are_neither_many_nor_few(low, span, about):
    high = low + span
    ticks = round_ticks(low, high, about=about)
    slack = 1e-6 * span
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    assert about / 2.5 - 1 <= len(ticks) <= about + 1


@given(low=st.floats(-1e3, 1e3), span=st.floats(0.1, 1e3))
def test_ticks_stand_at_equal_distances(low, span):
    ticks = round_ticks(low, low + span, about=6)
    distances = [after - before for before, after in pairwise(ticks)]
    assert distances == pytest.approx([distances[0]] * len(distances))


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, 1.0), (0.0, math.inf), (math.nan, 1)])
def test_an_impossible_range_is_refused(low, high):
    with pytest.raises(ValueError, match="low < high"):
        round_ticks(low, high, about=5)


def test_no_interval_at_all_is_refused():
    with pytest.raises(ValueError, match="about must be positive, not 0"):
        round_ticks(0.0, 1.0, about=0)


def test_a_margin_is_added_on_both_sides():
    assert widen(0.0, 2.0, margin=0.1) == pytest.approx((-0.2, 2.2))


def test_a_single_value_stands_in_the_middle_of_its_range():
    assert widen(4.0, 4.0) == (2.0, 6.0)
    assert widen(0.0, 0.0) == (-0.5, 0.5)


@pytest.mark.parametrize(("low", "high"), [(0.0, 5e-324), (5e-324, 5e-324), (-5e-324, 1e-310)])
def test_a_range_too_narrow_to_be_divided_is_that_of_a_single_value(low, high):
    assert widen(low, high) == (-0.5, 0.5)
    assert round_ticks(*widen(low, high), about=5) == (-0.4, -0.2, 0.0, 0.2, 0.4)


def test_values_map_linearly_to_pixels_and_stay_on_the_axis():
    axis = Axis(low=0.0, high=10.0, pixel_low=200.0, pixel_high=100.0)
    assert [axis.pixel(value) for value in (-5, 0, 2.5, 10, 99)] == [200, 200, 175, 100, 100]
