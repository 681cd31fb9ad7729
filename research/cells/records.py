"""The records of cells: a file for each until a study is complete, and then one table for all.

```
{"settings": {...}, "method": ..., "evaluations": [[0, 0.25], ...], "steps": {"ess": [...], ...}}
```

A record holds what a table, a figure or an alarm reads, in as many digits as they need.
`CellStore.pack` gathers the records of a study in `cells.jsonl.bz2` and removes their files, so
that a thousand cells fit into a repository. bzip2 makes numbers smaller than xz does. A failed cell
leaves a file with its error, which is removed once the cell succeeds.
"""

from __future__ import annotations

import bz2
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from research.cells.cell import Cell
from vcpo.service.lifecycle import StartError

LOG_WEIGHT_QUANTILES: Final = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
"""Quantiles of a batch's log weights that a record keeps; the last one is the largest."""

_DIGITS: Final = {
    "ess_ratio": 5,
    "on_policy_ess_ratio": 5,
    "ess": 5,
    "kl_per_token": 4,
    "gradient_norm": 2,
    "learning_rate": 3,
}
"""Significant digits of each number of a step. The early warning asks of the last two only how many
times larger they are than a threshold."""
_LOG_WEIGHTS: Final = tuple(f"log_weight_{share}" for share in LOG_WEIGHT_QUANTILES)
_LOG_WEIGHT_DECIMALS: Final = 3
_COLUMNS: Final = (*_DIGITS, *_LOG_WEIGHTS)
_MODEL_FILES: Final = ("*.json", "*.py", "*.safetensors")

_Numbers = tuple[float, ...]
_Optionals = tuple[float | None, ...]
_Document = dict[str, Any]
_Place = tuple[str, int, float, int]
"""Method, lag, learning rate and seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """The numbers of a cell's steps: entry s - 1 of each tuple is of step s.

    A cell whose policy gave logits that are not finite took no further step.
    """

    ess_ratio: _Numbers
    """As the learning-rate rule reads it; 0 when a weight has no value."""
    on_policy_ess_ratio: _Numbers
    ess: _Optionals
    """Effective sample size, in trajectories; None when a weight has no value."""
    kl_per_token: _Optionals
    """KL divergence from behavior to target policy, nats; None when a weight has no value."""
    gradient_norm: _Numbers
    """Before clipping; 0 when there is none."""
    learning_rate: _Numbers | None
    """At which each step was taken, 0 of a skipped one; None in a table that has no such column."""
    log_weights: tuple[tuple[float, ...] | None, ...]
    """Log importance weights of trajectories before truncation, nats, at `LOG_WEIGHT_QUANTILES`;
    None when a weight has no value. Empty in a packed record that no claim reads."""


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

    def __init__(self, folder: Path, *, model: str | None) -> None:
        """Use a folder.

        model: `model_identity` of the study's model; None, where it is not here, takes records of
            any model.
        """
        self._folder = folder
        self._model = model

    def save(self, cell: Cell, record: CellRecord) -> None:
        """Write a cell's file atomically."""
        document = {
            "settings": {**cell.settings, "model": self._model},
            "method": record.method,
            "lag": record.lag,
            "learning_rate": record.learning_rate,
            "seed": record.seed,
            "cpu_s": record.cpu_s,
            "evaluations": [[each.step, each.accuracy] for each in record.evaluations],
            "steps": _written_columns(record.steps, cell.spec.batch.trajectories),
        }
        path = self._path(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, _line(document).encode())
        self._error_path(cell).unlink(missing_ok=True)

    def save_error(self, cell: Cell, error: str) -> None:
        """Write the error of a failed cell."""
        path = self._error_path(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(error, encoding="utf-8")

    def error(self, cell: Cell) -> str | None:
        """Return the error of a cell that failed when it was last run, or None."""
        try:
            return self._error_path(cell).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def load(self, cell: Cell) -> CellRecord | None:
        """Return a cell's record; None when there is none, or when it is of other settings.

        Raises:
            StartError: when a file holds no records; it names the file.
        """
        document = self._document(cell)
        return None if document is None else _record(document)

    def holds(self, cell: Cell, *, with_log_weights: bool = False) -> bool:
        """Return whether the cell has been run with exactly these settings.

        with_log_weights: whether its record must have them, as a claim's does.

        Raises:
            StartError: as `load`.
        """
        document = self._document(cell)
        if document is None or not with_log_weights:
            return document is not None
        return _LOG_WEIGHTS[0] in document["steps"]

    def pack(self, cells: Iterable[Cell], claimed: Iterable[CellRecord]) -> None:
        """Gather the records of a study in its table, and remove their files.

        cells: all of the study; the table keeps no other. claimed: the records at the synchronous
        rates, whose log weights are kept.
        """
        kept = set(map(_place, claimed))
        found = [(cell, self._document(cell)) for cell in sorted(cells, key=lambda at: at.name)]
        packed = [(cell, document) for cell, document in found if document is not None]
        text = _table_text(
            document if _place(cell) in kept else _without_log_weights(document)
            for cell, document in packed
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        _write(self._table, bz2.compress(text.encode()))
        for cell, _ in packed:
            self._path(cell).unlink(missing_ok=True)

    def _document(self, cell: Cell) -> _Document | None:
        """Return the record of a cell with these settings as it was written, or None."""
        path = self._path(cell)
        document: _Document | None
        if path.exists():
            document = _read_file(path)
        elif self._table.exists():
            document = _read_table(self._table, self._table.stat().st_mtime_ns).get(_place(cell))
        else:
            document = None
        if document is None:
            return None
        settings = dict(document["settings"])
        is_same = self._model in {None, settings.pop("model")} and cell.has_settings(settings)
        return document if is_same else None

    @property
    def _table(self) -> Path:
        return self._folder / "cells.jsonl.bz2"

    def _path(self, cell: Cell) -> Path:
        return self._folder / "cells" / f"{cell.name}.json"

    def _error_path(self, cell: Cell) -> Path:
        return self._folder / "cells" / f"{cell.name}.error"


def table_records(path: Path) -> list[CellRecord]:
    """Return all records of a study's table, whatever the settings of today are.

    Raises:
        StartError: when the file holds no records.
    """
    return [_record(each) for each in _read_table(path, path.stat().st_mtime_ns).values()]


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


def _place(of: Cell | CellRecord) -> _Place:
    return of.method, of.lag, of.learning_rate, of.seed


def _record(document: _Document) -> CellRecord:
    settings = document["settings"]
    trajectories = settings["batch.promptsPerStep"] * settings["batch.trajectoriesPerPrompt"]
    return CellRecord(
        method=document["method"],
        lag=document["lag"],
        learning_rate=document["learning_rate"],
        seed=document["seed"],
        cpu_s=document["cpu_s"],
        steps=_read_columns(document["steps"], trajectories),
        evaluations=tuple(
            EvaluationRow(step=step, accuracy=accuracy)
            for step, accuracy in document["evaluations"]
        ),
    )


def _table_text(documents: Iterable[_Document]) -> str:
    """Return the lines of a table: all records without their steps, then a line for each column.

    Equal columns of many cells side by side are smaller than cell after cell.
    """
    records = list(documents)
    heads = [{key: value for key, value in at.items() if key != "steps"} for at in records]
    columns = [[name, [at["steps"].get(name) for at in records]] for name in _COLUMNS]
    return "".join(map(_line, [heads, *columns]))


@functools.lru_cache(maxsize=1)
def _read_table(path: Path, _changed_ns: int) -> Mapping[_Place, _Document]:
    """Return the records of a table; the time of its last change tells tables apart."""
    try:
        heads, *columns = map(json.loads, bz2.decompress(path.read_bytes()).splitlines())
    except (OSError, ValueError) as error:
        raise _no_records(path, error) from None
    found: dict[_Place, _Document] = {}
    for index, head in enumerate(heads):
        steps = {name: cells[index] for name, cells in columns if cells[index] is not None}
        place = head["method"], head["lag"], head["learning_rate"], head["seed"]
        found[place] = {**head, "steps": steps}
    return found


def _read_file(path: Path) -> _Document:
    try:
        document: _Document = json.loads(path.read_bytes())
    except ValueError as error:
        raise _no_records(path, error) from None
    return document


def _no_records(path: Path, error: Exception) -> StartError:
    return StartError(f"{path} holds no records ({error}); delete it to run its cells again")


def _without_log_weights(document: _Document) -> _Document:
    steps = {name: each for name, each in document["steps"].items() if name not in _LOG_WEIGHTS}
    return document | {"steps": steps}


def _line(content: object) -> str:
    return json.dumps(content, separators=(",", ":")) + "\n"


def _write(path: Path, content: bytes) -> None:
    """Write a file as a whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)


def _written_columns(steps: StepColumns, trajectories: int) -> dict[str, Any]:
    """Return the columns as a line holds them.

    The ESS is written as a share of the batch, and left out where it equals the other ESS ratio.
    """
    shares = [None if each is None else each / trajectories for each in steps.ess]
    columns = {
        name: [_rounded(value, digits) for value in getattr(steps, name)]
        for name, digits in _DIGITS.items()
        if getattr(steps, name) is not None
    }
    columns["ess"] = [_rounded(share, _DIGITS["ess"]) for share in shares]
    if columns["ess"] == columns["ess_ratio"]:
        del columns["ess"]
    rows = steps.log_weights
    for index, name in enumerate(_LOG_WEIGHTS):
        columns[name] = [
            None if row is None else round(row[index], _LOG_WEIGHT_DECIMALS) for row in rows
        ]
    return columns


def _read_columns(columns: Mapping[str, Any], trajectories: int) -> StepColumns:
    shares = columns.get("ess", columns["ess_ratio"])
    rates = columns.get("learning_rate")
    rows = zip(*(columns.get(name, ()) for name in _LOG_WEIGHTS), strict=True)
    return StepColumns(
        ess_ratio=tuple(columns["ess_ratio"]),
        on_policy_ess_ratio=tuple(columns["on_policy_ess_ratio"]),
        ess=tuple(None if each is None else each * trajectories for each in shares),
        kl_per_token=tuple(columns["kl_per_token"]),
        gradient_norm=tuple(columns["gradient_norm"]),
        learning_rate=None if rates is None else tuple(rates),
        log_weights=tuple(None if row[0] is None else row for row in rows),
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")
