"""The exact interval of a probability that is known from few trials."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

CONFIDENCE: Final = 0.95
_HALVINGS: Final = 60
"""Bisections of [0, 1]; the last interval is shorter than a float can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proportion:
    """The share of trials that had an outcome, and the interval of the outcome's probability."""

    count: int
    """Trials with the outcome."""
    trials: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Share of the trials with the outcome."""
        return self.count / self.trials


def proportion(count: int, trials: int) -> Proportion:
    """Return a share of trials with its Clopper-Pearson interval of 95 %.

    The interval holds every probability under which neither so many nor so few outcomes have a
    chance below 2.5 %.

    Raises: ValueError unless 0 <= count <= trials and trials >= 1.
    Source: Clopper and Pearson 1934, Biometrika 26(4).
    """
    if not 0 <= count <= trials or trials < 1:
        raise ValueError(f"count is {count} of {trials} trials: it must be in [0, trials]")
    return Proportion(
        count=count,
        trials=trials,
        low=0.0 if count == 0 else 1.0 - _upper_end(trials - count, trials),
        high=1.0 if count == trials else _upper_end(count, trials),
    )


def _upper_end(count: int, trials: int) -> float:
    """Return the probability under which at most `count` outcomes have a chance of 2.5 %."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _chance_of_at_most(count, trials, middle) > (1.0 - CONFIDENCE) / 2:
            low = middle
        else:
            high = middle
    return high


def _chance_of_at_most(count: int, trials: int, probability: float) -> float:
    return math.fsum(
        math.comb(trials, each) * probability**each * (1.0 - probability) ** (trials - each)
        for each in range(count + 1)
    )
