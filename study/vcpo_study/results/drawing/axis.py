"""Axes: round ticks and the mapping from values to pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass

_ROUND_FACTORS = (1.0, 2.0, 5.0, 10.0)
_LEAST_SPAN = 1e-300
"""Narrower ranges cannot be divided: the parts are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A linear axis: values from `low` to `high` (low < high) lie between two pixels."""

    low: float
    high: float
    pixel_low: float
    """Where `low` is drawn; for a vertical axis this is the larger number."""
    pixel_high: float

    def pixel(self, value: float) -> float:
        """Return where a value is drawn, clamped to the axis, to a tenth of a pixel."""
        share = (value - self.low) / (self.high - self.low)
        clamped = min(1.0, max(0.0, share))
        return round(self.pixel_low + clamped * (self.pixel_high - self.pixel_low), 1)


def round_ticks(low: float, high: float, *, about: int, whole: bool = False) -> tuple[float, ...]:
    """Return round numbers within [low, high]: multiples of 1, 2 or 5 times a power of ten.

    about: wanted number of intervals; the result has at most that many and more than a third of
        it. whole: whether to return whole numbers only, which may be fewer.

    Raises:
        ValueError: when the range is empty or not finite, or `about` is not positive.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"low < high must hold and both be finite, not {low} and {high}")
    if about < 1:
        raise ValueError(f"about must be positive, not {about}")
    step = _round_up((high - low) / about)
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))  # so that 3 * 0.1 is written 0.3
    return tuple(round(index * step, digits) + 0.0 for index in range(first, last + 1))


def widen(low: float, high: float, *, margin: float = 0.05) -> tuple[float, float]:
    """Return the range with a margin on both sides; a range of one value gets a width."""
    span = high - low
    if span < _LEAST_SPAN:
        span = abs(low) if abs(low) > _LEAST_SPAN else 1.0
        margin = 0.5
    return low - margin * span, high + margin * span


def _round_up(value: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(value))
    return next(
        magnitude * factor for factor in _ROUND_FACTORS if magnitude * factor >= value * (1 - 1e-9)
    )
