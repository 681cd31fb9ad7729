"""A study's numbers: one row per method and lag, and two headline numbers per method."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Final

from vcpo_study.cells.records import CellRecord
from vcpo_study.results.measures import collapse_step, final_accuracy, steps_to

TARGET_SHARE: Final = 0.95
"""The target of `steps_to_target`, as a share of the synchronous final accuracy."""
FAR_LAG: Final = 128
NEAR_LAG: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRow:
    """One method at one lag, over its seeds."""

    method: str
    lag: int
    learning_rate: float
    num_seeds: int
    final_accuracy_mean: float
    final_accuracy_std: float
    """Sample standard deviation over seeds; 0 for one seed."""
    final_accuracy_min: float
    final_accuracy_max: float
    collapses: int
    """Seeds whose cell collapsed; see `measures.collapse_step`."""
    steps_to_target: float | None
    """Median over seeds of the steps to 95 % of the method's own final accuracy at lag 0. A seed
    that never reaches it counts as infinite. None when the median is infinite, or without lag 0."""
    cpu_s_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LagRobustness:
    """How much of its performance a method keeps on old data; None where the grid lacks a cell."""

    k128_over_k0: float | None
    """Mean final accuracy at lag 128 over that at lag 0."""
    steps_ratio_k32: float | None
    """Steps to the target at lag 32 over those at lag 0; also None when it is not reached."""


_Value = Callable[[GridRow], float | None]


def grid_rows(records: Iterable[CellRecord]) -> list[GridRow]:
    """Return the rows, in the order in which methods and lags first occur."""
    cells: dict[tuple[str, int], list[CellRecord]] = defaultdict(list)
    for record in records:
        cells[record.method, record.lag].append(record)
    rows = []
    for (method, lag), group in cells.items():
        finals = [final_accuracy(record.evaluations) for record in group]
        row = GridRow(
            method=method,
            lag=lag,
            learning_rate=group[0].learning_rate,
            num_seeds=len(group),
            final_accuracy_mean=fmean(finals),
            final_accuracy_std=stdev(finals) if len(finals) > 1 else 0.0,
            final_accuracy_min=min(finals),
            final_accuracy_max=max(finals),
            collapses=sum(collapse_step(record.evaluations) is not None for record in group),
            steps_to_target=_median_steps(group, cells.get((method, 0), ())),
            cpu_s_mean=fmean(record.cpu_s for record in group),
        )
        rows.append(row)
    return rows


def lag_robustness(method: str, rows: Sequence[GridRow]) -> LagRobustness:
    """Return the two headline numbers of a method."""
    by_lag = {row.lag: row for row in rows if row.method == method}
    return LagRobustness(
        k128_over_k0=_ratio(by_lag, FAR_LAG, lambda row: row.final_accuracy_mean),
        steps_ratio_k32=_ratio(by_lag, NEAR_LAG, lambda row: row.steps_to_target),
    )


def _median_steps(group: Sequence[CellRecord], synchronous: Sequence[CellRecord]) -> float | None:
    if not synchronous:
        return None
    goal = TARGET_SHARE * fmean(final_accuracy(record.evaluations) for record in synchronous)
    reached = [steps_to(record.evaluations, goal) for record in group]
    middle = median(math.inf if steps is None else steps for steps in reached)
    return middle if math.isfinite(middle) else None


def _ratio(by_lag: Mapping[int, GridRow], lag: int, value: _Value) -> float | None:
    if lag not in by_lag or 0 not in by_lag:
        return None
    stale, synchronous = value(by_lag[lag]), value(by_lag[0])
    return stale / synchronous if stale is not None and synchronous else None
