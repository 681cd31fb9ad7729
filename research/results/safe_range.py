"""The range of learning rates at which a method still reaches a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True, kw_only=True)
class SafeRange:
    """A range of learning rates."""

    low: float
    high: float
    is_cut: bool
    """Whether it reaches an end of the rates that were tried, and so may be wider."""

    @property
    def decades(self) -> float:
        """Width: decimal logarithm of the highest rate over the lowest."""
        return math.log10(self.high / self.low)


def safe_range(curve: Sequence[tuple[float, float]], target: float) -> SafeRange | None:
    """Return the widest range of rates at which the accuracy is at least a target, or None.

    curve: learning rate, above 0, and accuracy, by rising rate.
    Between two neighboring rates the accuracy is linear in the logarithm of the rate. Of equally
    wide ranges the one at the lowest rates is returned.
    """
    places = [(math.log10(rate), accuracy) for rate, accuracy in curve]
    last = len(places) - 1
    ranges = []
    for is_safe, indices in groupby(range(len(places)), lambda at: places[at][1] >= target):
        if is_safe:
            inside = list(indices)
            first, end = inside[0], inside[-1]
            low, high = places[first][0], places[end][0]
            if first > 0:
                low = _crossing(places[first - 1], places[first], target)
            if end < last:
                high = _crossing(places[end], places[end + 1], target)
            is_cut = first == 0 or end == last
            ranges.append(SafeRange(low=10.0**low, high=10.0**high, is_cut=is_cut))
    return max(ranges, key=lambda found: found.decades, default=None)


def _crossing(before: tuple[float, float], after: tuple[float, float], target: float) -> float:
    """Return where the line through two points, on either side of the target, meets it."""
    share = (target - before[1]) / (after[1] - before[1])
    return before[0] + share * (after[0] - before[0])
