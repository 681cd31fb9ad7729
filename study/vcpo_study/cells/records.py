"""The record of a cell: one file of JSON lines, written atomically at the cell's end.

```
{"kind": "cell", "method": ..., "digest": ...}     first
{"kind": "step", ...}  {"kind": "evaluation", ...}  in any order
```

A failed cell leaves a file with its error instead, which is removed once the cell succeeds.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from vcpo.records.step_record import UpdateRecord
from vcpo_study.cells.cell import Cell

_FLAT_DIAGNOSTICS: Final = ("token_ess_ratio", "kl_per_token", "top_gradient_share")
"""Diagnostics that older files hold beside the other numbers of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow(UpdateRecord):
    """One optimizer step."""

    step: int
    """Number of the step, from 1."""
    ess: float | None
    """Effective sample size in trajectories; None when a weight has no value."""

    @property
    def kl_per_token(self) -> float | None:
        """KL divergence from behavior to target policy, nats; None when a weight has no value."""
        kl: float | None = self.diagnostics.get("kl_per_token")
        return kl


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """Accuracy of one policy version on the held-out prompts."""

    step: int
    """Steps taken before the evaluation."""
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    """The record of a finished cell."""

    method: str
    lag: int
    learning_rate: float
    seed: int
    digest: str
    cpu_s: float
    """Processor time of training and evaluation, in seconds."""
    steps: tuple[StepRow, ...]
    evaluations: tuple[EvaluationRow, ...]


class CellStore:
    """The folder with the records of cells."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "cells"

    def save(self, cell: Cell, record: CellRecord) -> None:
        """Write a cell's file atomically."""
        self._folder.mkdir(parents=True, exist_ok=True)
        document = asdict(record)
        steps, evaluations = document.pop("steps"), document.pop("evaluations")
        entries = [
            {"kind": "cell", **document},
            *({"kind": "step", **row} for row in steps),
            *({"kind": "evaluation", **row} for row in evaluations),
        ]
        path = self._path(cell)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(f"{json.dumps(row)}\n" for row in entries), encoding="utf-8")
        partial.replace(path)
        self._error_path(cell).unlink(missing_ok=True)

    def save_error(self, cell: Cell, error: str) -> None:
        """Write the error of a failed cell."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._error_path(cell).write_text(error, encoding="utf-8")

    def error(self, cell: Cell) -> str | None:
        """Return the error of a cell that failed when it was last run, or None."""
        try:
            return self._error_path(cell).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def load(self, cell: Cell) -> CellRecord | None:
        """Return a cell's record; None when there is none, or when it is of other settings."""
        try:
            lines = self._path(cell).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return None
        if not lines or json.loads(lines[0])["digest"] != cell.digest:
            return None
        rows: dict[str, list[dict[str, Any]]] = {"cell": [], "step": [], "evaluation": []}
        for line in lines:
            row = json.loads(line)
            rows[row.pop("kind")].append(row)
        known = {each.name for each in fields(StepRow)}
        steps = []
        for row in rows["step"]:
            # Older files have no mean length, and diagnostics beside the other numbers.
            flat = {key: row[key] for key in _FLAT_DIAGNOSTICS if key in row}
            values = {"response_tokens_mean": math.nan, "diagnostics": flat, **row}
            steps.append(StepRow(**{key: values[key] for key in known & values.keys()}))
        evaluations = tuple(EvaluationRow(**row) for row in rows["evaluation"])
        return CellRecord(**rows["cell"][0], steps=tuple(steps), evaluations=evaluations)

    def holds(self, cell: Cell) -> bool:
        """Return whether the cell has been run with exactly these settings."""
        try:
            with self._path(cell).open(encoding="utf-8") as file:
                return bool(json.loads(file.readline())["digest"] == cell.digest)
        except FileNotFoundError:
            return False

    def _path(self, cell: Cell) -> Path:
        return self._folder / f"{cell.name}.jsonl"

    def _error_path(self, cell: Cell) -> Path:
        return self._folder / f"{cell.name}.error"
