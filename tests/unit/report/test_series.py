import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.report.series import decimate, points, rolling_mean, runs, smoothing_window

CURVES = st.lists(st.none() | st.floats(-1e3, 1e3), max_size=300).map(
    lambda values: points(list(enumerate(values)))
)


def values_of(curve):
    return [point.y for point in curve]


def test_numbers_that_cannot_be_drawn_become_gaps():
    curve = points([(1, 0.5), (2, math.nan), (3, math.inf), (4, None), (5, 1e308)])
    assert values_of(curve) == [0.5, None, None, None, None]


def test_the_mean_is_centered_and_truncated_at_the_ends():
    curve = points([(1, 3.0), (2, 6.0), (3, 0.0), (4, 9.0)])
    assert values_of(rolling_mean(curve, window=3)) == [4.5, 3.0, 5.0, 4.5]


def test_a_gap_stays_a_gap_and_does_not_pull_the_mean():
    curve = points([(1, 2.0), (2, None), (3, 4.0)])
    assert values_of(rolling_mean(curve, window=3)) == [2.0, None, 4.0]


def test_a_huge_value_does_not_blur_the_means_after_it():
    curve = points([(1, 1e20), (2, 1.0), (3, 2.0), (4, 3.0)])
    assert values_of(rolling_mean(curve, window=3))[2:] == [2.0, 2.5]


@given(curve=CURVES)
def test_a_mean_never_leaves_the_range_of_its_values(curve):
    known = [value for value in values_of(curve) if value is not None]
    smoothed = [value for value in values_of(rolling_mean(curve, window=7)) if value is not None]
    assert all(min(known) - 1e-6 <= value <= max(known) + 1e-6 for value in smoothed)


@pytest.mark.parametrize("window", [0, -1, 4])
def test_a_window_without_a_center_is_refused(window):
    with pytest.raises(ValueError, match=f"positive odd number, not {window}"):
        rolling_mean((), window=window)


@pytest.mark.parametrize(("num_points", "window"), [(20, 5), (400, 21), (420, 21), (10000, 501)])
def test_the_window_is_odd_and_about_a_twentieth(num_points, window):
    assert smoothing_window(num_points) == window


@given(curve=CURVES, limit=st.integers(2, 40))
def test_thinning_keeps_to_its_limit_and_invents_no_point(curve, limit):
    thinned = decimate(curve, limit=limit)
    assert len(thinned) <= limit
    assert set(thinned) <= set(curve)


@given(curve=CURVES, limit=st.integers(2, 40))
def test_thinning_keeps_the_order_and_both_extremes(curve, limit):
    thinned = decimate(curve, limit=limit)
    steps = [point.x for point in thinned]
    known = [value for value in values_of(curve) if value is not None]
    kept = [value for value in values_of(thinned) if value is not None]
    assert steps == sorted(steps)
    assert (min(kept, default=0), max(kept, default=0)) == (
        min(known, default=0),
        max(known, default=0),
    )


def test_a_single_spike_survives_ten_thousand_points():
    curve = points([(step, 9.0 if step == 7777 else 1.0) for step in range(10_000)])
    assert [point.x for point in decimate(curve, limit=100) if point.y == 9.0] == [7777]


def test_a_wide_gap_survives_thinning():
    curve = points([(step, None if 40 <= step < 60 else 1.0) for step in range(100)])
    assert None in values_of(decimate(curve, limit=20))


def test_thinning_to_less_than_two_points_is_refused():
    with pytest.raises(ValueError, match="limit must be at least 2, not 1"):
        decimate((), limit=1)


def test_a_curve_falls_into_runs_between_its_gaps():
    curve = points([(1, None), (2, 5.0), (3, 6.0), (4, None), (5, None), (6, 7.0)])
    assert list(runs(curve)) == [[(2, 5.0), (3, 6.0)], [(6, 7.0)]]
