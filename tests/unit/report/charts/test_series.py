import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.report.charts.series import (
    column,
    highs,
    lows,
    means,
    rolling_mean,
    rows_per_bucket,
    smoothing_window,
)

COLUMNS = st.lists(st.none() | st.floats(-1e3, 1e3), max_size=300).map(tuple)


def test_numbers_that_cannot_be_drawn_become_gaps():
    assert column([0.5, math.nan, math.inf, None, 1e308]) == (0.5, None, None, None, None)


def test_the_mean_is_centered_and_truncated_at_the_ends():
    assert rolling_mean((3.0, 6.0, 0.0, 9.0), window=3) == (4.5, 3.0, 5.0, 4.5)


def test_a_gap_stays_a_gap_and_does_not_pull_the_mean():
    assert rolling_mean((2.0, None, 4.0), window=3) == (2.0, None, 4.0)


def test_a_huge_value_does_not_blur_the_means_after_it():
    assert rolling_mean((1e20, 1.0, 2.0, 3.0), window=3)[2:] == (2.0, 2.5)


@given(values=COLUMNS)
def test_a_mean_never_leaves_the_range_of_its_values(values):
    known = [value for value in values if value is not None]
    smoothed = [value for value in rolling_mean(values, window=7) if value is not None]
    assert all(min(known) - 1e-6 <= value <= max(known) + 1e-6 for value in smoothed)


@given(values=COLUMNS, window=st.sampled_from([1, 3, 7, 31]))
def test_a_mean_is_that_of_the_known_values_in_its_window(values, window):
    reach = window // 2
    for index, mean in enumerate(rolling_mean(values, window=window)):
        around = values[max(0, index - reach) : index + reach + 1]
        known = [value for value in around if value is not None]
        expected = None if values[index] is None else sum(known) / len(known)
        assert mean == (None if expected is None else pytest.approx(expected, abs=1e-9))


@pytest.mark.parametrize("window", [0, -1, 4])
def test_a_window_without_a_center_is_refused(window):
    with pytest.raises(ValueError, match=f"positive odd number, not {window}"):
        rolling_mean((), window=window)


@pytest.mark.parametrize(("num_rows", "window"), [(20, 5), (400, 21), (420, 21), (10000, 501)])
def test_the_window_is_odd_and_about_a_twentieth(num_rows, window):
    assert smoothing_window(num_rows) == window


@pytest.mark.parametrize(
    ("num_rows", "rows"), [(0, 1), (999, 1), (1000, 1), (1001, 2), (2000, 2), (10_000, 10)]
)
def test_a_bucket_holds_as_few_rows_as_the_limit_allows(num_rows, rows):
    assert rows_per_bucket(num_rows, limit=1000) == rows


def test_no_bucket_at_all_is_refused():
    with pytest.raises(ValueError, match="limit must be positive, not 0"):
        rows_per_bucket(10, limit=0)


def test_a_bucket_has_its_least_its_most_and_its_mean():
    values = (1.0, 4.0, None, 2.0, None, None, 5.0)
    assert lows(values, rows=3) == (1.0, 2.0, 5.0)
    assert highs(values, rows=3) == (4.0, 2.0, 5.0)
    assert means(values, rows=3) == (2.5, 2.0, 5.0)


def test_a_bucket_of_gaps_is_a_gap():
    values = (1.0, 2.0, None, None)
    assert (lows(values, rows=2), highs(values, rows=2)) == ((1.0, None), (2.0, None))
    assert means(values, rows=2) == (1.5, None)


@given(values=COLUMNS, limit=st.integers(1, 40))
def test_buckets_keep_every_extreme_and_to_the_limit(values, limit):
    rows = rows_per_bucket(len(values), limit=limit)
    low, high = lows(values, rows=rows), highs(values, rows=rows)
    known = [value for value in values if value is not None]
    assert len(low) == len(high) <= limit
    assert min((each for each in low if each is not None), default=0) == min(known, default=0)
    assert max((each for each in high if each is not None), default=0) == max(known, default=0)
    for index, value in enumerate(values):
        assert value is None or low[index // rows] <= value <= high[index // rows]
