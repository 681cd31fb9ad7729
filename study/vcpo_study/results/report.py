"""Writes the report of a study: `results.json`, `results.md` and the figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from vcpo.algo import WarningLevel
from vcpo.report.numbers import UNKNOWN, compact, decimal, duration
from vcpo_study.cells.records import CellRecord
from vcpo_study.results.alarms import AlarmQuality, alarm_quality
from vcpo_study.results.figures import figures
from vcpo_study.results.measures import FINAL_EVALUATIONS
from vcpo_study.results.summary import GridRow, LagRobustness, grid_rows, lag_robustness
from vcpo_study.results.tuning import TunedRate
from vcpo_study.study import VCPOStudy

FIGURES_FOLDER: Final = "results"

JUDGED_LEVELS: Final = (WarningLevel.WARN, WarningLevel.CRITICAL)
"""Levels of the early warning that the report judges."""

Alarms = Mapping[WarningLevel, AlarmQuality]
"""Quality of each level's alarms over all cells."""


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
    alarms = {level: alarm_quality(records, level) for level in JUDGED_LEVELS}
    drawings = figures(data.study.spec, data.records, rows)
    (folder / FIGURES_FOLDER).mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings.items():
        (folder / FIGURES_FOLDER / name).write_text(drawing, encoding="utf-8")
    summary = json.dumps(study_summary(data, rows, alarms), indent=1)
    (folder / "results.json").write_text(summary + "\n", encoding="utf-8")
    document = folder / "results.md"
    document.write_text("\n".join(_document(data, rows, alarms)) + "\n", encoding="utf-8")
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
        "alarms": {level.value: asdict(quality) for level, quality in alarms.items()},
        "uncontrolled": None
        if spec.uncontrolled is None
        else asdict(lag_robustness(spec.uncontrolled, rows)),
        "cells": len(data.records),
        "failed_cells": sorted(data.failures),
        "grid": [asdict(row) for row in rows],
        "tuning": [asdict(rate) for rate in data.tuned],
    }


def _document(data: ReportData, rows: Sequence[GridRow], alarms: Alarms) -> Iterator[str]:
    study = data.study
    yield f"# Results: {study.metadata.name}\n"
    yield f"```\n{data.command}\n```\n"
    yield _setting(data)
    yield "\n## What is kept as data grows old\n"
    yield from _headlines(data, rows)
    yield from _alarm_table(alarms)
    yield "\n## Final accuracy\n"
    yield f"Mean of the last {FINAL_EVALUATIONS} evaluations; mean ± standard deviation over seeds,"
    yield "the lowest seed in brackets, and the number of seeds that collapsed if any did.\n"
    yield from _table(data, rows, _accuracy_cell)
    yield f"\n![Final accuracy by lag]({FIGURES_FOLDER}/final.svg)\n"
    yield f"![Accuracy by step, a panel per lag]({FIGURES_FOLDER}/accuracy.svg)\n"
    yield "## Steps to 95 % of the synchronous final accuracy\n"
    yield "Median over seeds; the target is the method's own at k = 0.\n"
    yield from _table(data, rows, lambda row: decimal(row.steps_to_target, ".0f"))
    yield "\n## Before a fall\n"
    yield "Cells whose accuracy fell by 0.2 or more below its best, aligned at the bottom of the"
    yield "fall; running medians of 10 steps on a logarithmic scale.\n"
    yield f"![Signals before falls]({FIGURES_FOLDER}/before_falls.svg)"
    yield from _tuning(data)
    if data.failures:
        yield "\n## Cells that failed\n"
    for name, error in sorted(data.failures.items()):
        yield f"- `{name}`: {error.strip().splitlines()[-1]}"


def _setting(data: ReportData) -> str:
    run = data.study.spec.run
    batch, held_out = run.batch, run.evaluation
    total_s = sum(record.cpu_s for record in data.records)
    return (
        f"{len(data.records)} cells of {run.steps} steps, {duration(total_s)} of processor "
        f"time. Task `{run.environment.name}`, batches of {batch.prompts_per_step} prompts x "
        f"{batch.trajectories_per_prompt} trajectories, accuracy on {held_out.prompts} held-out "
        f"prompts every {held_out.every_steps} steps. The batch of step s is sampled by version "
        "max(0, s - k), exactly: by the real engine's decoding, and trained on by the real update."
    )


def _headlines(data: ReportData, rows: Sequence[GridRow]) -> Iterator[str]:
    ratios = "accuracy at k = 128 over k = 0 | steps to target, k = 32 over k = 0"
    yield f"| method | learning rate | {ratios} |"
    yield "|---|---|---|---|"
    for method in data.study.spec.methods:
        found = lag_robustness(method.name, rows)
        if found != LagRobustness(k128_over_k0=None, steps_ratio_k32=None):
            rates = sorted({row.learning_rate for row in rows if row.method == method.name})
            cells = (
                ", ".join(map(compact, rates)),
                decimal(found.k128_over_k0, ".3f"),
                decimal(found.steps_ratio_k32, ".2f"),
            )
            yield f"| {method.label} | {' | '.join(cells)} |"


def _alarm_table(alarms: Alarms) -> Iterator[str]:
    collapses = next(iter(alarms.values())).num_collapses
    yield "\n## Early warning\n"
    yield f"{collapses} cells of grid and tuning collapsed: an evaluation fell below half of the"
    yield "best one before it. Lead is counted from the first alarm, and is 0 without one.\n"
    yield "| level | collapses warned of | median lead, steps | false alarms in the other cells |"
    yield "|---|---|---|---|"
    for level, found in alarms.items():
        lead, rate = decimal(found.lead_steps, ".0f"), decimal(found.false_alarm_rate, ".1%")
        yield f"| {level} | {found.num_warned} of {collapses} | {lead} | {rate} |"


def _table(
    data: ReportData, rows: Sequence[GridRow], show: Callable[[GridRow], str]
) -> Iterator[str]:
    by_place = {(row.method, row.lag): row for row in rows}
    lags = sorted({row.lag for row in rows})
    yield "| method | " + " | ".join(f"k = {lag}" for lag in lags) + " |"
    yield "|---" * (len(lags) + 1) + "|"
    for method in data.study.spec.methods:
        shown = [by_place.get((method.name, lag)) for lag in lags]
        if any(shown):
            cells = (UNKNOWN if row is None else show(row) for row in shown)
            yield f"| {method.label} | " + " | ".join(cells) + " |"


def _accuracy_cell(row: GridRow) -> str:
    collapsed = f", {row.collapses} collapsed" if row.collapses else ""
    return (
        f"{row.final_accuracy_mean:.3f} ± {row.final_accuracy_std:.3f} "
        f"({row.final_accuracy_min:.3f}{collapsed})"
    )


def _tuning(data: ReportData) -> Iterator[str]:
    yield "\n## Learning rates\n"
    tuning = data.study.spec.tuning
    if tuning is None:
        rate = data.study.spec.run.optimizer.learning_rate
        yield f"Every method trains at {compact(rate)}."
        return
    yield f"Mean final accuracy at k = {tuning.lag} over {len(tuning.seeds)} seeds that the grid"
    yield "does not use; the same candidates for every method, the chosen one in bold.\n"
    rates = sorted(tuning.learning_rates)
    yield "| method | " + " | ".join(compact(rate) for rate in rates) + " |"
    yield "|---" * (len(rates) + 1) + "|"
    found = {(each.method, each.learning_rate): each for each in data.tuned}
    for method in data.study.spec.methods:
        cells = []
        for rate in rates:
            judged = found.get((method.name, rate))
            accuracy = decimal(None if judged is None else judged.final_accuracy, ".3f")
            cells.append(f"**{accuracy}**" if judged is not None and judged.chosen else accuracy)
        yield f"| {method.label} | " + " | ".join(cells) + " |"
