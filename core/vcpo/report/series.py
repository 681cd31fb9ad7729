"""Curves before drawing: points with gaps, thinned and smoothed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from vcpo.report.numbers import finite

_LARGEST = 1e300
"""Largest number that is drawn; margins and sums of larger ones would overflow."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a curve."""

    x: float
    y: float | None
    """None is a gap."""


Points = tuple[Point, ...]
"""A curve, in order of x."""


def points(values: Sequence[tuple[float, float | None]]) -> Points:
    """Return the curve of (x, y) pairs; a y that is infinite, NaN or huge becomes a gap."""
    return tuple(Point(x, y if _drawable(y) else None) for x, y in values)


def rolling_mean(curve: Points, *, window: int) -> Points:
    """Smooth a curve with a centered mean over `window` points without the gaps.

    Near the ends the window is truncated, so the mean is shifted inward by at most a quarter of the
    window. A gap stays a gap.

    Raises:
        ValueError: when `window` is not a positive odd number.
    """
    if window < 1 or window % 2 == 0:
        raise ValueError(f"window must be a positive odd number, not {window}")
    reach = window // 2
    values = [point.y or 0.0 for point in curve]
    counts = list(accumulate((point.y is not None for point in curve), initial=0))
    smoothed = []
    for index, point in enumerate(curve):
        first, past_last = max(0, index - reach), min(len(curve), index + reach + 1)
        # Each sum is independent: in a running sum one huge value would blur all later ones.
        total, known = sum(values[first:past_last]), counts[past_last] - counts[first]
        smoothed.append(Point(point.x, None if point.y is None else total / known))
    return tuple(smoothed)


def smoothing_window(num_points: int) -> int:
    """Return an odd window of about a twentieth of the curve, at least 5 points."""
    return max(5, num_points // 20 | 1)


def decimate(curve: Points, *, limit: int) -> Points:
    """Thin a curve to at most `limit` points that still show every spike.

    The curve is divided into stretches of equal length. Each keeps its first lowest and its first
    highest point, in order. A gap remains only where a whole stretch is missing.

    Raises:
        ValueError: when `limit` is less than 2.
    """
    if limit < 2:
        raise ValueError(f"limit must be at least 2, not {limit}")
    if len(curve) <= limit:
        return curve
    stretches = limit // 2
    bounds = [len(curve) * index // stretches for index in range(stretches + 1)]
    kept: list[Point] = []
    for first, past_last in pairwise(bounds):
        kept.extend(_extremes(curve[first:past_last]))
    return tuple(kept)


def runs(curve: Points) -> Iterator[list[tuple[float, float]]]:
    """Yield the stretches between gaps, as (x, y) pairs."""
    run: list[tuple[float, float]] = []
    for point in curve:
        if point.y is not None:
            run.append((point.x, point.y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _drawable(y: float | None) -> bool:
    return finite(y) is not None and abs(y or 0.0) <= _LARGEST


def _extremes(stretch: Points) -> list[Point]:
    present = [(point.y, point) for point in stretch if point.y is not None]
    if not present:
        return [stretch[0]]
    lowest = min(present, key=lambda pair: pair[0])[1]
    highest = max(present, key=lambda pair: pair[0])[1]
    return [lowest] if lowest is highest else sorted((lowest, highest), key=lambda point: point.x)
