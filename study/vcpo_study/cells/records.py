"""The record of a cell: one compressed file of two JSON lines, written atomically at its end.

```
{"settings": {...}, "method": ..., "evaluations": [[0, 0.25], [16, 0.375], ...]}
{"reward_mean": [...], "ess_ratio": [...], ...}       a list for each number of a step
```

A number of a step has five significant digits, and a log weight three decimals. So a record of 384
steps takes 5 to 14 kB, and a thousand of them fit into a repository.

A failed cell leaves a file with its error instead, which is removed once the cell succeeds.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from vcpo.service.lifecycle import StartError
from vcpo_study.cells.cell import Cell

LOG_WEIGHT_QUANTILES: Final = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
"""Quantiles of a batch's log weights that a record keeps; the last one is the largest."""

_LOG_WEIGHT_DECIMALS: Final = 3
_SIGNIFICANT_DIGITS: Final = 5
_MODEL_FILES: Final = ("*.json", "*.py", "*.safetensors")

_Numbers = tuple[float, ...]
_Optionals = tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """The numbers of a cell's steps: entry s - 1 of each tuple is of step s.

    A cell whose policy gave logits that are not finite took no further step.
    """

    reward_mean: _Numbers
    response_tokens_mean: _Numbers
    """Sampled tokens of a response."""
    ess_ratio: _Numbers
    """As the learning-rate rule reads it; 0 when a weight has no value."""
    on_policy_ess_ratio: _Numbers
    ess: _Optionals
    """Effective sample size, in trajectories; None when a weight has no value."""
    kl_per_token: _Optionals
    """KL divergence from behavior to target policy, nats; None when a weight has no value."""
    gradient_norm: _Numbers
    """Before clipping; 0 when there is none."""
    learning_rate_scale: _Numbers
    """0 when the step was skipped."""
    masked_share: _Numbers
    """Share of the tokens that the method gives no gradient."""
    log_weights: tuple[tuple[float, ...] | None, ...]
    """Log importance weights of trajectories before truncation, nats, at `LOG_WEIGHT_QUANTILES`;
    None when a weight has no value."""
    skipped: Mapping[int, str]
    """Why no update was made, by the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """Accuracy of one policy version on the held-out prompts."""

    step: int
    """Steps taken before the evaluation."""
    accuracy: float
    """0 where the policy's logits are not finite, and from there on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    """The record of a finished cell."""

    method: str
    lag: int
    learning_rate: float
    seed: int
    cpu_s: float
    """Processor time of training and evaluation, in seconds."""
    steps: StepColumns
    evaluations: tuple[EvaluationRow, ...]


class CellStore:
    """The folder with the records of a study's cells."""

    def __init__(self, folder: Path, *, model: str) -> None:
        """Use a folder; `model` is the `model_identity` of the study's model."""
        self._folder = folder
        self._model = model

    def save(self, cell: Cell, record: CellRecord) -> None:
        """Write a cell's file atomically."""
        self._folder.mkdir(parents=True, exist_ok=True)
        header = {
            "settings": {**cell.settings, "model": self._model},
            "method": record.method,
            "lag": record.lag,
            "learning_rate": record.learning_rate,
            "seed": record.seed,
            "cpu_s": record.cpu_s,
            "evaluations": [[each.step, each.accuracy] for each in record.evaluations],
        }
        columns = _written_columns(record.steps, cell.spec.batch.trajectories)
        lines = [json.dumps(each, separators=(",", ":")) for each in (header, columns)]
        path = self._path(cell)
        partial = path.with_suffix(".partial")
        partial.write_bytes(lzma.compress("\n".join(lines).encode(), preset=9))
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
        """Return a cell's record; None when there is none, or when it is of other settings.

        Raises:
            StartError: when the file is no record; it names the file.
        """
        lines = self._lines(cell)
        if lines is None or not self._is_of(cell, lines[0]):
            return None
        header, columns = map(json.loads, lines)
        return CellRecord(
            method=header["method"],
            lag=header["lag"],
            learning_rate=header["learning_rate"],
            seed=header["seed"],
            cpu_s=header["cpu_s"],
            steps=_read_columns(columns, cell.spec.batch.trajectories),
            evaluations=tuple(
                EvaluationRow(step=step, accuracy=accuracy)
                for step, accuracy in header["evaluations"]
            ),
        )

    def holds(self, cell: Cell) -> bool:
        """Return whether the cell has been run with exactly these settings.

        Raises:
            StartError: as `load`.
        """
        lines = self._lines(cell)
        return lines is not None and self._is_of(cell, lines[0])

    def _lines(self, cell: Cell) -> list[str] | None:
        path = self._path(cell)
        try:
            header, columns = lzma.decompress(path.read_bytes()).decode().split("\n")
        except FileNotFoundError:
            return None
        except (lzma.LZMAError, ValueError) as error:
            message = f"{path} is no record of a cell ({error}); delete it to run the cell again"
            raise StartError(message) from None
        return [header, columns]

    def _is_of(self, cell: Cell, header: str) -> bool:
        settings: dict[str, Any] = json.loads(header)["settings"]
        return settings.pop("model") == self._model and cell.has_settings(settings)

    def _path(self, cell: Cell) -> Path:
        return self._folder / f"{cell.name}.json.xz"

    def _error_path(self, cell: Cell) -> Path:
        return self._folder / f"{cell.name}.error"


def model_identity(name: str, revision: str | None) -> str:
    """Return what a model is known by in records: a checksum of its files, or its hub name.

    name: directory or hub name.
    """
    folder = Path(name)
    if not folder.is_dir():
        return name if revision is None else f"{name}@{revision}"
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _MODEL_FILES for path in folder.glob(pattern)):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _written_columns(steps: StepColumns, trajectories: int) -> dict[str, Any]:
    """Return the columns as a file holds them.

    The ESS is written as a share of the batch: where it equals the other ESS ratio, the two columns
    are the same text, and the second one takes no space.
    """
    columns = {each.name: getattr(steps, each.name) for each in fields(steps)}
    log_weights, skipped = columns.pop("log_weights"), columns.pop("skipped")
    columns["ess"] = [None if each is None else each / trajectories for each in steps.ess]
    return {
        **{name: list(map(_rounded, column)) for name, column in columns.items()},
        "log_weights": [
            [
                None if row is None else round(row[place], _LOG_WEIGHT_DECIMALS)
                for row in log_weights
            ]
            for place in range(len(LOG_WEIGHT_QUANTILES))
        ],
        "skipped": skipped,
    }


def _read_columns(columns: Mapping[str, Any], trajectories: int) -> StepColumns:
    rows = zip(*columns["log_weights"], strict=True)
    read: dict[str, Any] = {
        **{each.name: tuple(columns[each.name]) for each in fields(StepColumns)},
        "ess": tuple(None if each is None else each * trajectories for each in columns["ess"]),
        "log_weights": tuple(None if row[0] is None else row for row in rows),
        "skipped": {int(step): why for step, why in columns["skipped"].items()},
    }
    return StepColumns(**read)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
