"""The synchronous target, and the learning rate at which each method reaches it first.

Both come from the tuning cells alone: every method at every rate, at lag 0, on seeds that nothing
else uses. So they stay as they are while the rest of a study runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Final

from research.cells.records import CellRecord
from research.results.measures import final_accuracy, steps_to

TARGET_SHARE: Final = 0.95
"""The target, as a share of the best synchronous accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedRate:
    """One learning rate of one method at lag 0, over the tuning seeds."""

    method: str
    learning_rate: float
    final_accuracy: float
    """Mean over the seeds."""
    steps_to_target: float | None
    """Median over the seeds; a seed that never arrives counts as infinite, and so does None."""
    num_seeds: int
    chosen: bool
    """Whether this is the method's synchronous rate."""


def synchronous_target(tuning: Iterable[CellRecord]) -> float | None:
    """Return 0.95 of the best mean final accuracy of any method and rate; None without records.

    tuning: records of cells at lag 0.
    """
    means = [_mean_final(records) for records in _by_rate(tuning).values()]
    return TARGET_SHARE * max(means) if means else None


def own_targets(tuning: Iterable[CellRecord]) -> Mapping[str, float]:
    """Return 0.95 of each method's own best mean final accuracy, by method.

    tuning: records of cells at lag 0.
    """
    best: dict[str, float] = defaultdict(float)
    for (method, _), records in _by_rate(tuning).items():
        best[method] = max(best[method], TARGET_SHARE * _mean_final(records))
    return best


def tuned_rates(tuning: Sequence[CellRecord]) -> list[TunedRate]:
    """Judge every rate of every method, and choose the synchronous rate of each method.

    It is the rate with the fewest steps to the target; of equals, the lower one. A method that
    never arrives gets the rate with the highest final accuracy; of equals, the lower one.

    tuning: records of cells at lag 0. Returns one entry per method and rate, in that order.
    """
    target = synchronous_target(tuning)
    if target is None:
        return []
    judged = [
        TunedRate(
            method=method,
            learning_rate=rate,
            final_accuracy=_mean_final(records),
            steps_to_target=median_steps_to(records, target),
            num_seeds=len(records),
            chosen=False,
        )
        for (method, rate), records in sorted(_by_rate(tuning).items())
    ]
    best: dict[str, TunedRate] = {}
    for each in judged:
        if each.method not in best or _preference(each) < _preference(best[each.method]):
            best[each.method] = each
    return [replace(each, chosen=each is best[each.method]) for each in judged]


def synchronous_rates(tuned: Iterable[TunedRate]) -> Mapping[str, float]:
    """Return the synchronous rate of each method that was tuned."""
    return {each.method: each.learning_rate for each in tuned if each.chosen}


def median_steps_to(records: Iterable[CellRecord], target: float) -> float | None:
    """Return the median over records of the steps to a target; None when it is infinite.

    A record that never arrives counts as infinite.
    """
    reached = [steps_to(record.evaluations, target) for record in records]
    middle = median(math.inf if steps is None else steps for steps in reached)
    return middle if math.isfinite(middle) else None


def _preference(rate: TunedRate) -> tuple[float, float]:
    """Return what is lowest for the best rate."""
    if rate.steps_to_target is None:
        return math.inf, -rate.final_accuracy
    return rate.steps_to_target, 0.0


def _mean_final(records: Iterable[CellRecord]) -> float:
    return fmean(final_accuracy(record.evaluations) for record in records)


def _by_rate(records: Iterable[CellRecord]) -> Mapping[tuple[str, float], list[CellRecord]]:
    found: dict[tuple[str, float], list[CellRecord]] = defaultdict(list)
    for record in records:
        found[record.method, record.learning_rate].append(record)
    return found
