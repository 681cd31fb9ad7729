"""The choice of learning rates from the records of the tuning cells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from vcpo_study.cells.records import CellRecord
from vcpo_study.results.measures import final_accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedRate:
    """One candidate rate of one method."""

    method: str
    learning_rate: float
    final_accuracy: float
    """Mean over the tuning seeds that finished."""
    num_seeds: int
    chosen: bool


def tuned_rates(records: Iterable[CellRecord]) -> list[TunedRate]:
    """Choose for each method the rate with the highest mean final accuracy; of equals, the lower.

    Returns one entry per method and rate, in that order; one of each method is chosen.
    """
    accuracies: dict[tuple[str, float], list[float]] = defaultdict(list)
    for record in records:
        key = record.method, record.learning_rate
        accuracies[key].append(final_accuracy(record.evaluations))
    means = {key: fmean(values) for key, values in accuracies.items()}
    best: dict[str, float] = {}
    for method, rate in sorted(means):
        if method not in best or means[method, rate] > means[method, best[method]]:
            best[method] = rate
    return [
        TunedRate(
            method=method,
            learning_rate=rate,
            final_accuracy=means[method, rate],
            num_seeds=len(accuracies[method, rate]),
            chosen=best[method] == rate,
        )
        for method, rate in sorted(means)
    ]


def synchronous_rates(tuned: Iterable[TunedRate]) -> Mapping[str, float]:
    """Return the synchronous rate of each method that was tuned."""
    return {each.method: each.learning_rate for each in tuned if each.chosen}
