"""How many times longer the median seed takes, and how far few seeds leave that open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Final

from research.results.proportion import CONFIDENCE

_RESAMPLES: Final = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class MedianRatio:
    """The ratio of two medians, and its interval of 95 %."""

    ratio: float
    low: float
    high: float | None
    """None when it is infinite."""


def median_ratio(
    values: Sequence[float | None], references: Sequence[float | None]
) -> MedianRatio | None:
    """Return the median of values over that of references, with a bootstrap interval.

    None among them stands for infinity, which a median may hold too: then the result is None. The
    interval lies between percentiles of the ratio over samples drawn with replacement from each
    side, always the same ones, so that equal data has equal intervals.

    Raises: ValueError without any value or reference.
    Source: Efron 1979, Annals of Statistics 7(1); the percentile interval.
    """
    if not values or not references:
        raise ValueError("a median needs at least one value on either side")
    above = [math.inf if each is None else each for each in values]
    below = [math.inf if each is None else each for each in references]
    if not math.isfinite(median(above)) or not 0.0 < median(below) < math.inf:
        return None
    draws = Random(0)  # noqa: S311 - repeatable on purpose
    ratios = sorted(
        _ratio(draws.choices(above, k=len(above)), draws.choices(below, k=len(below)))
        for _ in range(_RESAMPLES)
    )
    outside = round((1.0 - CONFIDENCE) / 2 * _RESAMPLES)
    low, high = ratios[outside], ratios[-1 - outside]
    return MedianRatio(
        ratio=median(above) / median(below),
        low=low,
        high=high if math.isfinite(high) else None,
    )


def _ratio(values: Sequence[float], references: Sequence[float]) -> float:
    """Return the ratio of the medians; infinite values make it infinite before references do."""
    above, below = median(values), median(references)
    return math.inf if math.isinf(above) or below == 0.0 else above / below
