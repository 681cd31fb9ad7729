"""Writes the report of studies: `results.md`, `results.json` and two figures for each study."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd

from research import results
from research.cells.records import CellRecord
from research.figures import save_figures
from research.study import StudySpec, VCPOStudy
from vcpo.report.numbers import compact

_HEAD: Final = """\
# Results

```
{command}
```

A cell trains one method at one policy lag k, one learning rate and one seed. The batch of step s is
sampled by version max(0, s - k). {cells:,} cells took {hours:.1f} hours of processor time.

- **Final accuracy**: mean of the evaluations in the last quarter of a cell's steps, over seeds.
- **Target**: 0.95 of the best final accuracy of any method and rate at k = 0, on the tuning seeds.
- **Rate** of a method: the one that reaches the target in the fewest steps there, kept as k grows.
- **Collapsed**: an evaluation falls below half of the best one before it, or the final accuracy is
  below half of the target; with the exact interval of 95 %.
- **Steps**: median steps to the target over those at k = 0, with a bootstrap interval of 95 %.
- **Subject gains**: final accuracy of the subject minus the method's, over pairs of one seed, with
  Student's interval of 95 %.
- **Safe decades**: the widest range of rates whose mean accuracy reaches the target; `>=`: it
  reaches an end of the rates tried.
"""
_STUDY: Final = """
## {name}

Task `{run.environment.name}`, {run.steps} steps of {run.batch.prompts_per_step} prompts x \
{run.batch.trajectories_per_prompt} trajectories; {run.evaluation.prompts} held-out
prompts. {cells:,} cells. Target {target:.3f}. Subject: {subject}.

{table}
"""
_CONDITIONS: Final = """
## Conditions that nobody tuned

Methods at one rate. The interval is the exact one of an accuracy on so many held-out prompts; it
does not hold the scatter of seeds.

{table}
"""
_LAGS: Final = (
    "k | method | rate | final accuracy | collapsed | steps | subject gains | safe decades"
)
_CONDITION: Final = "condition | k | method | rate | final accuracy | of k = 0 | collapsed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyData:
    """Everything from which the report of one study is made."""

    study: VCPOStudy
    records: Sequence[CellRecord]
    """Records of all its finished cells, each once."""
    failures: Mapping[str, str]
    """Errors by the name of the cell."""


def write_report(studies: Sequence[StudyData], folder: Path, command: str) -> Path:
    """Write the report's files into a folder and return the path of the document.

    command: what made it, as typed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in report_texts(studies, command, figures=folder).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "results.md"


def report_texts(
    studies: Sequence[StudyData], command: str, *, figures: Path | None = None
) -> dict[str, str]:
    """Return the report's texts by name of the file; figures: the folder to draw into, if any."""
    every = [each for data in studies for each in data.records]
    numbers: dict[str, Any] = {"command": command, "cells": len(every)}
    numbers |= {"studies": {}, "conditions": {}}
    sections, rows = [], list[Sequence[str]]()
    for data in studies:
        spec, name = data.study.spec, data.study.metadata.name
        cells = results.cell_frame(data.records)
        if spec.tuning is None:
            found = results.conditions(spec, cells)
            numbers["conditions"][name] = _records(found)
            rows += _condition_rows(name, spec, found)
        elif (tuned := results.tuning(spec, cells)) is not None:
            sections.append(_section(data, cells, tuned, numbers["studies"], figures))
    if rows:
        sections.append(_CONDITIONS.format(table=_table(_CONDITION, rows)))
    hours = sum(each.cpu_s for each in every) / 3600
    head = _HEAD.format(command=command, cells=len(every), hours=hours)
    text = json.dumps(numbers, indent=1, allow_nan=False)
    return {"results.json": f"{text}\n", "results.md": "".join([head, *sections])}


def _section(
    data: StudyData,
    cells: pd.DataFrame,
    tuned: results.Tuning,
    numbers: dict[str, Any],
    figures: Path | None,
) -> str:
    """Draw a study's figures, add its numbers, and return its section of the document."""
    spec, run, name = data.study.spec, data.study.spec.run, data.study.metadata.name
    lags = results.by_lag(spec, cells, tuned)
    safe = results.safe_rates(spec, cells, tuned.target)
    plane = results.plane(spec, cells)
    if figures is not None and not plane.empty and not lags.empty:
        save_figures(spec, plane, lags, safe, tuned, figures / name)
    numbers[name] = {
        "cells": len(cells),
        "target": tuned.target,
        "by_lag": _records(lags),
        "safe_rates": _records(safe),
        "plane": _records(plane.rename(columns="{:.0e}".format).reset_index()),
    }
    table, target = _table(_LAGS, _lag_rows(spec, lags, safe)), tuned.target
    place: dict[str, Any] = {"name": name, "run": run, "cells": len(cells), "subject": spec.subject}
    section = _STUDY.format(**place, target=target, table=table)
    last = [
        f"- `{at}`: {data.failures[at].strip().splitlines()[-1]}" for at in sorted(data.failures)
    ]
    return section + ("\nFailed cells:\n\n" + "\n".join(last) + "\n" if last else "")


def _lag_rows(study: StudySpec, lags: pd.DataFrame, safe: pd.DataFrame) -> Iterable[Sequence[str]]:
    decades = {
        (row.method, row.lag): f"{'>= ' * row.is_cut}{row.decades:.2f}" for row in safe.itertuples()
    }
    for row in lags.itertuples():
        own = row.method == study.subject
        yield (
            str(row.lag),
            study.method(row.method).label,
            compact(row.rate),
            f"{row.final:.3f} ± {row.std:.3f}",
            f"{row.collapses} of {row.cells} ({row.collapse_low:.2f} to {row.collapse_high:.2f})",
            _interval(row.steps_ratio, row.steps_low, row.steps_high, ".2f"),
            "" if own else _interval(row.gain, row.gain_low, row.gain_high, "+.3f"),
            decades.get((row.method, row.lag), "-"),
        )


def _condition_rows(name: str, study: StudySpec, found: pd.DataFrame) -> Iterable[Sequence[str]]:
    for row in found.itertuples():
        yield (
            name,
            str(row.lag),
            study.method(row.method).label,
            compact(row.rate),
            _interval(row.final, row.low, row.high, ".3f"),
            "-" if math.isnan(row.kept) else f"{row.kept:.3f}",
            f"{row.collapses} of {row.cells}",
        )


def _interval(value: float, low: float, high: float, form: str) -> str:
    if math.isnan(value):
        return "-"
    end = "-" if math.isinf(high) else format(high, form)
    return f"{value:{form}}" + ("" if math.isnan(low) else f" ({low:{form}} to {end})")


def _table(heads: str, rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, " | ".join("---" for _ in heads.split(" | ")), *map(" | ".join, rows)]
    return "\n".join(f"| {line} |" for line in lines)


def _records(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return rows as JSON values: numbers in six digits, null for what has none."""
    return [
        {name: _rounded(value) for name, value in row.items()} for row in rows.to_dict("records")
    ]


def _rounded(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
