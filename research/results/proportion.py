"""The exact interval of a probability that is known from few trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scipy.stats import binomtest

CONFIDENCE: Final = 0.95


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
    ends = binomtest(count, trials).proportion_ci(CONFIDENCE)
    return Proportion(count=count, trials=trials, low=float(ends.low), high=float(ends.high))
