"""Columns of numbers before drawing: gaps, smoothing, and thinning that keeps every spike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from statistics import fmean

from vcpo.report.numbers import finite

_LARGEST = 1e300
"""Largest number that is drawn; sums of larger ones would overflow."""

Column = tuple[float | None, ...]
"""One number per row of a table; None is a gap."""


def column(values: Iterable[float | None]) -> Column:
    """Return a column; a value that is infinite, NaN or huge becomes a gap."""
    return tuple(
        value if finite(value) is not None and abs(value or 0.0) <= _LARGEST else None
        for value in values
    )


def rolling_mean(values: Column, *, window: int) -> Column:
    """Smooth a column with a centered mean over `window` rows without the gaps.

    Near the ends the window is truncated, so the mean is shifted inward by at most a quarter of the
    window. A gap stays a gap.

    Raises:
        ValueError: when `window` is not a positive odd number.
    """
    if window < 1 or window % 2 == 0:
        raise ValueError(f"window must be a positive odd number, not {window}")
    known = [value or 0.0 for value in values]
    counts = list(accumulate((value is not None for value in values), initial=0))
    reach = window // 2
    smoothed: list[float | None] = []
    for index, (value, total) in enumerate(zip(values, _window_sums(known, window), strict=True)):
        first, past_last = max(0, index - reach), min(len(values), index + reach + 1)
        num_known = counts[past_last] - counts[first]
        smoothed.append(None if value is None else total / num_known)
    return tuple(smoothed)


def _window_sums(values: Sequence[float], window: int) -> Iterator[float]:
    """Yield the sum of the window around each value, truncated at the ends, in linear time.

    A running sum would carry the rounding of one huge value into all later windows. Here a whole
    window is the end of one block of `window` values and the start of the next, so a sum holds
    nothing from outside its window (van Herk's method for running maxima, used for sums).
    """
    blocks = [values[first : first + window] for first in range(0, len(values), window)]
    from_start = [total for block in blocks for total in accumulate(block)]
    to_end = [total for block in blocks for total in reversed(list(accumulate(reversed(block))))]
    reach = window // 2
    for index in range(len(values)):
        first, past_last = index - reach, index + reach + 1
        if first < 0 or past_last > len(values):
            yield sum(values[max(0, first) : past_last])
        elif first % window == 0:
            yield from_start[past_last - 1]
        else:
            yield to_end[first] + from_start[past_last - 1]


def smoothing_window(num_rows: int) -> int:
    """Return an odd window of about a twentieth of the rows, at least 5 rows."""
    return max(5, num_rows // 20 | 1)


def rows_per_bucket(num_rows: int, *, limit: int) -> int:
    """Return how many rows in a row share a bucket, so that there are at most `limit` buckets.

    Raises:
        ValueError: when `limit` is not positive.
    """
    if limit < 1:
        raise ValueError(f"limit must be positive, not {limit}")
    return max(1, -(-num_rows // limit))


def lows(values: Column, *, rows: int) -> Column:
    """Return the lowest value of each bucket of `rows` rows; None where all are gaps."""
    return tuple(min(known, default=None) for known in _buckets(values, rows))


def highs(values: Column, *, rows: int) -> Column:
    """Return the highest value of each bucket of `rows` rows; None where all are gaps."""
    return tuple(max(known, default=None) for known in _buckets(values, rows))


def means(values: Column, *, rows: int) -> Column:
    """Return the mean of each bucket of `rows` rows; None where all are gaps."""
    return tuple(fmean(known) if known else None for known in _buckets(values, rows))


def _buckets(values: Column, rows: int) -> Iterable[Sequence[float]]:
    for first in range(0, len(values), rows):
        yield [value for value in values[first : first + rows] if value is not None]
