"""What is claimed of each method at its synchronous rate: collapse, accuracy, speed, weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles, stdev

from research.cells.records import CellRecord
from research.results.measures import deepest_dip, final_accuracy, has_collapsed, steps_to
from research.results.proportion import Proportion, proportion
from research.results.tuning import median_steps_to


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRow:
    """One method at one lag and at its synchronous rate, over the seeds of the claims."""

    method: str
    lag: int
    learning_rate: float
    num_seeds: int
    collapse: Proportion
    """Seeds whose cell collapsed; see `measures.has_collapsed`."""
    final_accuracy_mean: float
    final_accuracy_std: float
    """Sample standard deviation over seeds; 0 for one seed."""
    final_accuracy_min: float
    final_accuracy_max: float
    steps_to_target: float | None
    """Median over seeds of the steps to the synchronous target; None when it is infinite."""
    steps_to_target_min: float | None
    steps_to_target_max: float | None
    """None when a seed never arrives."""
    steps_to_target_by_seed: tuple[float | None, ...]
    """In order of seeds; None for one that never arrives."""
    deepest_dip_mean: float
    deepest_dip_max: float
    """Largest fall of an evaluation below an earlier one of the same cell, over seeds."""
    ess_median: float | None
    """Effective sample size in trajectories, over all steps of full lag and all seeds."""
    ess_low: float | None
    """Its 5 % quantile."""
    log_weights: tuple[float, ...] | None
    """Median over the same steps of the quantiles `LOG_WEIGHT_QUANTILES` of a batch's log weights,
    nats, before truncation; the last one is the largest of all. None without such a step."""


def claim_rows(records: Iterable[CellRecord], target: float) -> list[ClaimRow]:
    """Return the rows, in the order in which methods and lags first occur.

    records: those of the claims. target: the synchronous target.
    """
    cells: dict[tuple[str, int], list[CellRecord]] = defaultdict(list)
    for record in records:
        cells[record.method, record.lag].append(record)
    return [_row(group, target) for group in cells.values()]


def _row(group: Sequence[CellRecord], target: float) -> ClaimRow:
    finals = [final_accuracy(record.evaluations) for record in group]
    collapses = sum(has_collapsed(record.evaluations, target) for record in group)
    steps = [steps_to(record.evaluations, target) for record in group]
    arrived = [each for each in steps if each is not None]
    dips = [deepest_dip(record.evaluations) for record in group]
    ess = [each for record in group for each in record.steps.ess[record.lag :] if each is not None]
    return ClaimRow(
        method=group[0].method,
        lag=group[0].lag,
        learning_rate=group[0].learning_rate,
        num_seeds=len(group),
        collapse=proportion(collapses, len(group)),
        final_accuracy_mean=fmean(finals),
        final_accuracy_std=stdev(finals) if len(finals) > 1 else 0.0,
        final_accuracy_min=min(finals),
        final_accuracy_max=max(finals),
        steps_to_target=median_steps_to(group, target),
        steps_to_target_min=min(arrived, default=None),
        steps_to_target_max=max(arrived) if len(arrived) == len(steps) else None,
        steps_to_target_by_seed=tuple(steps),
        deepest_dip_mean=fmean(dips),
        deepest_dip_max=max(dips),
        ess_median=median(ess) if ess else None,
        ess_low=quantiles(ess, n=20, method="inclusive")[0] if len(ess) > 1 else None,
        log_weights=_log_weights(group),
    )


def _log_weights(group: Sequence[CellRecord]) -> tuple[float, ...] | None:
    """Merge the quantiles of all steps of full lag; the largest stays the largest."""
    steps = [
        each
        for record in group
        for each in record.steps.log_weights[record.lag :]
        if each is not None
    ]
    if not steps:
        return None
    *inner, largest = zip(*steps, strict=True)
    return (*map(median, inner), max(largest))
