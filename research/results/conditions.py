"""Conditions: studies without a tuning, in which methods are compared where none of them was tuned.

A condition has few cells, often of one seed. So the interval is that of an accuracy on so many
held-out prompts; it does not hold the scatter of seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from research.cells.records import CellRecord
from research.results.measures import collapse_step, final_accuracy
from research.results.proportion import proportion
from research.results.tables import table
from research.study import StudySpec
from vcpo.report.numbers import compact, decimal

_COLUMNS: Final = (
    "condition",
    "method",
    "k",
    "rate",
    "final accuracy",
    "interval",
    "of k = 0",
    "collapsed",
    "ESS",
    "on-policy ratio",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionRow:
    """One method at one lag and rate, over the seeds of a condition."""

    method: str
    lag: int
    learning_rate: float
    num_seeds: int
    final_accuracy: float
    """Mean over seeds."""
    low: float
    high: float
    """Its exact interval of 95 %, of as many trials as there are held-out prompts."""
    kept: float | None
    """Final accuracy over the same method's at this rate without lag; None at k = 0 and where
    nothing was learnt without lag, or nothing ran."""
    num_collapsed: int
    """Seeds in which an evaluation fell below half of the best one before it."""
    ess_median: float | None
    """Effective sample size in trajectories, over steps of full lag and seeds; None without one."""
    on_policy_ess_ratio: float
    """Median over steps and seeds, in (0, 1]; 1 where sampler and learner agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What a condition shows of its subject."""

    name: str
    subject: str
    cells: int
    cpu_hours: float
    rows: tuple[ConditionRow, ...]
    is_won: bool | None
    """Whether no other method ends above the subject's interval at any lag; None while cells are
    missing."""


def condition(name: str, study: StudySpec, records: Sequence[CellRecord]) -> Condition:
    """Judge a condition; records: of its cells."""
    rows = tuple(
        _row(study, found, _of(records, method.name, 0, rate))
        for lag in study.lags
        for method in study.methods
        for rate in study.learning_rates
        if (found := _of(records, method.name, lag, rate))
    )
    places = len(study.lags) * len(study.methods) * len(study.learning_rates)
    is_whole = len(records) == places * len(study.seeds)
    return Condition(
        name=name,
        subject=study.subject,
        cells=len(records),
        cpu_hours=round(sum(each.cpu_s for each in records) / 3600, 2),
        rows=rows,
        is_won=_is_won(rows, study.subject) if is_whole else None,
    )


def _of(
    records: Sequence[CellRecord], method: str, lag: int, learning_rate: float
) -> list[CellRecord]:
    place = method, lag, learning_rate
    return [each for each in records if (each.method, each.lag, each.learning_rate) == place]


def _row(
    study: StudySpec, cells: Sequence[CellRecord], fresh: Sequence[CellRecord]
) -> ConditionRow:
    """Return the row of a place; fresh: the cells of the same method and rate without lag."""
    evaluation = study.run.evaluation
    trials = evaluation.prompts * evaluation.samples_per_prompt
    accuracy = _mean_accuracy(cells)
    interval = proportion(round(accuracy * trials), trials)
    first = cells[0]
    ess = [each for cell in cells for each in cell.steps.ess[cell.lag :] if each is not None]
    return ConditionRow(
        method=first.method,
        lag=first.lag,
        learning_rate=first.learning_rate,
        num_seeds=len(cells),
        final_accuracy=accuracy,
        low=interval.low,
        high=interval.high,
        kept=_kept(accuracy, fresh) if first.lag else None,
        num_collapsed=sum(collapse_step(each.evaluations) is not None for each in cells),
        ess_median=median(ess) if ess else None,
        on_policy_ess_ratio=median(
            ratio for cell in cells for ratio in cell.steps.on_policy_ess_ratio
        ),
    )


def _mean_accuracy(cells: Sequence[CellRecord]) -> float:
    return fmean(final_accuracy(each.evaluations) for each in cells)


def _kept(accuracy: float, fresh: Sequence[CellRecord]) -> float | None:
    without_lag = _mean_accuracy(fresh) if fresh else 0.0
    return accuracy / without_lag if without_lag else None


def _is_won(rows: Sequence[ConditionRow], subject: str) -> bool:
    own = {(row.lag, row.learning_rate): row for row in rows if row.method == subject}
    return all(row.final_accuracy <= own[row.lag, row.learning_rate].high for row in rows)


def condition_table(conditions: Sequence[tuple[Condition, StudySpec]]) -> str:
    """Return a row for each method of each condition; the highest accuracy is bold."""
    lines = []
    for found, study in conditions:
        best = max((row.final_accuracy for row in found.rows), default=0.0)
        for row in found.rows:
            accuracy = decimal(row.final_accuracy, ".3f")
            lines.append(
                (
                    found.name,
                    study.method(row.method).label,
                    str(row.lag),
                    compact(row.learning_rate),
                    f"**{accuracy}**" if row.final_accuracy == best else accuracy,
                    f"{row.low:.3f} to {row.high:.3f}",
                    decimal(row.kept, ".3f"),
                    f"{row.num_collapsed} of {row.num_seeds}",
                    decimal(row.ess_median, ".1f"),
                    decimal(row.on_policy_ess_ratio, ".3f"),
                )
            )
    return table(_COLUMNS, lines)
