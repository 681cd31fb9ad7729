"""Writes the report of a study: `results.json`, `results.md` and the figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from vcpo.algo import WarningLevel
from vcpo.report.numbers import UNKNOWN, compact, decimal, duration
from vcpo_study.cells.records import CellRecord
from vcpo_study.results.alarms import AlarmQuality, alarm_quality, low_ess_quality
from vcpo_study.results.figures import figures
from vcpo_study.results.measures import FINAL_EVALUATIONS
from vcpo_study.results.summary import GridRow, LagRobustness, grid_rows, lag_robustness
from vcpo_study.results.tuning import TunedRate
from vcpo_study.study import StudyMethod, StudySpec, VCPOStudy

FIGURES_FOLDER: Final = "results"

JUDGED_LEVELS: Final = (WarningLevel.WARN, WarningLevel.CRITICAL)
"""Levels of the early warning that the report judges."""

Alarms = Mapping[str, AlarmQuality]
"""Quality of alarms over all cells: by level of the early warning, and `low_ess`."""

_HEADLINE_COLUMNS: Final = (
    "method",
    "learning rate",
    "accuracy at k = 128 over k = 0",
    "steps to target, k = 32 over k = 0",
)
_ALARM_COLUMNS: Final = (
    "alarm",
    "collapses warned of",
    "median lead, steps",
    "false alarms in the other cells",
)
_DOCUMENT: Final = """\
# Results: {name}

```
{command}
```

{cells} cells of {run.steps} steps, {cpu_time} of processor time. \
Task `{run.environment.name}`, \
batches of {run.batch.prompts_per_step} prompts x \
{run.batch.trajectories_per_prompt} trajectories, \
accuracy on {run.evaluation.prompts} held-out prompts every {run.evaluation.every_steps} steps. \
The batch of step s is sampled by version max(0, s - k), exactly: \
by the real engine's decoding, and trained on by the real update.

## What is kept as data grows old

{headlines}

## Early warning

{collapses} cells of grid and tuning collapsed: an evaluation fell below half of the
best one before it. Lead is counted from the first alarm, and is 0 without one. `warn` and
`critical` are levels of the early warning; `low_ess` is a mean ESS below 30 % of the on-policy one
for 30 steps.

{alarms}

## Final accuracy

Mean of the last {last} evaluations; mean ± standard deviation over seeds,
the lowest seed in brackets, and the number of seeds that collapsed if any did.

{accuracy}

![Final accuracy by lag]({folder}/final.svg)

![Accuracy by step, a panel per lag]({folder}/accuracy.svg)

## Steps to 95 % of the synchronous final accuracy

Median over seeds; the target is the method's own at k = 0.

{steps}

## Before a fall

Cells whose accuracy fell by 0.2 or more below its best, aligned at the bottom of the
fall; running medians of 10 steps on a logarithmic scale.

![Signals before falls]({folder}/before_falls.svg)

## Learning rates

{learning_rates}
"""
"""`results.md`, up to the list of failed cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Everything from which a report is made."""

    study: VCPOStudy
    command: str
    """The command that made it, as typed."""
    records: Sequence[CellRecord]
    """Records of the grid's cells."""
    tuning_records: Sequence[CellRecord]
    """Records of the cells that decided learning rates."""
    tuned: Sequence[TunedRate]
    failures: Mapping[str, str]
    """Errors by the name of the cell."""


def write_study_report(data: ReportData, folder: Path) -> Path:
    """Write the report's files into a folder and return the path of the document."""
    rows = grid_rows(data.records)
    # The tuning cells count too: runs fall at learning rates that the grid does not use.
    records = [*data.records, *data.tuning_records]
    levels = {level.value: alarm_quality(records, level) for level in JUDGED_LEVELS}
    alarms = {**levels, "low_ess": low_ess_quality(records)}
    drawings = figures(data.study.spec, data.records, rows)
    (folder / FIGURES_FOLDER).mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings.items():
        (folder / FIGURES_FOLDER / name).write_text(drawing, encoding="utf-8")
    summary = json.dumps(study_summary(data, rows, alarms), indent=1)
    (folder / "results.json").write_text(summary + "\n", encoding="utf-8")
    document = folder / "results.md"
    document.write_text(_document(data, rows, alarms), encoding="utf-8")
    return document


def study_summary(data: ReportData, rows: Sequence[GridRow], alarms: Alarms) -> dict[str, Any]:
    """Return the content of `results.json`: headline numbers first, then all rows."""
    spec = data.study.spec
    subject = lag_robustness(spec.subject, rows)
    return {
        "study": data.study.metadata.name,
        "command": data.command,
        "vcpo_k128_over_k0": subject.k128_over_k0,
        "steps_ratio_k32": subject.steps_ratio_k32,
        "warning_lead_steps": alarms[WarningLevel.CRITICAL].lead_steps,
        "false_alarm_rate": alarms[WarningLevel.CRITICAL].false_alarm_rate,
        "alarms": {name: asdict(quality) for name, quality in alarms.items()},
        "cells": len(data.records),
        "failed_cells": sorted(data.failures),
        "grid": [asdict(row) for row in rows],
        "tuning": [asdict(rate) for rate in data.tuned],
    }


def _document(data: ReportData, rows: Sequence[GridRow], alarms: Alarms) -> str:
    spec = data.study.spec
    judged = (
        (
            name,
            f"{found.num_warned} of {found.num_collapses}",
            decimal(found.lead_steps, ".0f"),
            decimal(found.false_alarm_rate, ".1%"),
        )
        for name, found in alarms.items()
    )
    document = _DOCUMENT.format(
        name=data.study.metadata.name,
        command=data.command,
        cells=len(data.records),
        cpu_time=duration(sum(record.cpu_s for record in data.records)),
        run=spec.run,
        headlines=_headline_table(spec.methods, rows),
        collapses=next(iter(alarms.values())).num_collapses,
        alarms=_table(_ALARM_COLUMNS, judged),
        last=FINAL_EVALUATIONS,
        accuracy=_grid_table(spec.methods, rows, _accuracy_cell),
        steps=_grid_table(spec.methods, rows, lambda row: decimal(row.steps_to_target, ".0f")),
        folder=FIGURES_FOLDER,
        learning_rates=_learning_rates(spec, data.tuned),
    )
    failures = [
        f"- `{name}`: {error.strip().splitlines()[-1]}\n"
        for name, error in sorted(data.failures.items())
    ]
    return "".join([document, "\n## Cells that failed\n\n" if failures else "", *failures])


def _headline_table(methods: Sequence[StudyMethod], rows: Sequence[GridRow]) -> str:
    lines = []
    for method in methods:
        found = lag_robustness(method.name, rows)
        if found != LagRobustness(k128_over_k0=None, steps_ratio_k32=None):
            rates = sorted({row.learning_rate for row in rows if row.method == method.name})
            kept = decimal(found.k128_over_k0, ".3f")
            slower = decimal(found.steps_ratio_k32, ".2f")
            lines.append((method.label, ", ".join(map(compact, rates)), kept, slower))
    return _table(_HEADLINE_COLUMNS, lines)


def _grid_table(
    methods: Sequence[StudyMethod], rows: Sequence[GridRow], show: Callable[[GridRow], str]
) -> str:
    by_place = {(row.method, row.lag): row for row in rows}
    lags = sorted({row.lag for row in rows})
    lines = []
    for method in methods:
        found = [by_place.get((method.name, lag)) for lag in lags]
        if any(found):
            shown = (UNKNOWN if row is None else show(row) for row in found)
            lines.append((method.label, *shown))
    return _table(["method", *(f"k = {lag}" for lag in lags)], lines)


def _accuracy_cell(row: GridRow) -> str:
    collapsed = f", {row.collapses} collapsed" if row.collapses else ""
    return (
        f"{row.final_accuracy_mean:.3f} ± {row.final_accuracy_std:.3f} "
        f"({row.final_accuracy_min:.3f}{collapsed})"
    )


def _learning_rates(spec: StudySpec, tuned: Sequence[TunedRate]) -> str:
    rates = sorted(spec.learning_rates)
    found = {(each.method, each.learning_rate): each for each in tuned}
    lines = []
    for method in spec.methods:
        cells = []
        for rate in rates:
            judged = found.get((method.name, rate))
            accuracy = decimal(None if judged is None else judged.final_accuracy, ".3f")
            cells.append(f"**{accuracy}**" if judged is not None and judged.chosen else accuracy)
        lines.append((method.label, *cells))
    return (
        f"Mean final accuracy at k = 0 over {len(spec.tuning.seeds)} seeds that "
        "the grid\ndoes not use; the same candidates for every method, the chosen one in bold.\n\n"
        + _table(["method", *map(compact, rates)], lines)
    )


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    head, *body = (f"| {' | '.join(line)} |" for line in (columns, *lines))
    return "\n".join([head, "|---" * len(columns) + "|", *body])
