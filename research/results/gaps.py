"""What a study's subject gains over each other method at its synchronous rate, seed by seed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from scipy.stats import ttest_1samp

from research.cells.records import CellRecord
from research.results.measures import final_accuracy, steps_to
from research.results.median_ratio import MedianRatio, median_ratio
from research.results.proportion import CONFIDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The subject against one method at one lag, each at its synchronous rate."""

    method: str
    lag: int
    num_pairs: int
    """Seeds that both have."""
    accuracy: float
    """Final accuracy of the subject minus that of the method, mean over pairs."""
    low: float | None
    high: float | None
    """Its interval of 95 % by Student's t; None of a single pair."""
    steps_over: MedianRatio | None
    """Steps of the subject to the target over those of the method, ratio of medians over the same
    seeds; None where a median is infinite."""


def gaps(records: Iterable[CellRecord], subject: str, target: float) -> list[Gap]:
    """Return a row for each other method and lag, in order; records: those of the claims.

    Methods see the same prompts under one seed, so seeds are compared in pairs.
    """
    cells: dict[tuple[str, int], dict[int, CellRecord]] = defaultdict(dict)
    for record in records:
        cells[record.method, record.lag][record.seed] = record
    return [
        _gap(cells[subject, lag], others, target)
        for (method, lag), others in cells.items()
        if method != subject and cells.get((subject, lag), {}).keys() & others.keys()
    ]


def _gap(own: Mapping[int, CellRecord], others: Mapping[int, CellRecord], target: float) -> Gap:
    seeds = sorted(own.keys() & others.keys())
    differences = [
        final_accuracy(own[seed].evaluations) - final_accuracy(others[seed].evaluations)
        for seed in seeds
    ]
    low = high = None
    if len(differences) > 1:
        low, high = map(float, ttest_1samp(differences, 0.0).confidence_interval(CONFIDENCE))
    other = others[seeds[0]]
    return Gap(
        method=other.method,
        lag=other.lag,
        num_pairs=len(seeds),
        accuracy=fmean(differences),
        low=low,
        high=high,
        steps_over=median_ratio(
            [steps_to(own[seed].evaluations, target) for seed in seeds],
            [steps_to(others[seed].evaluations, target) for seed in seeds],
        ),
    )
