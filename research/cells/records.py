"""The records of cells: a file for each until a study is complete, and then one table for all.

`CellStore.pack` gathers the records of a study in `cells.jsonl.bz2` and removes their files, so
that a thousand cells fit into a repository. A failed cell leaves a file with its error, which is
removed once the cell succeeds.
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

_DIGITS: Final = {
    "ess_ratio": 5,
    "on_policy_ess_ratio": 5,
    "ess": 5,
    "gradient_norm": 2,
    "learning_rate": 3,
}
"""Significant digits of each number of a step. The early warning asks of the last two only how many
times larger they are than a threshold."""
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
    gradient_norm: _Numbers
    """Before clipping; 0 when there is none."""
    learning_rate: _Numbers | None
    """At which each step was taken, 0 of a skipped one; None in a table that has no such column."""


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
        self._table = folder / "cells.jsonl.bz2"

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
        """Return the record at a cell's place, whatever its settings were; None without one.

        Raises:
            StartError: when a file holds no records; it names the file.
        """
        document = self._document(cell)
        return None if document is None else _record(document)

    def holds(self, cell: Cell) -> bool:
        """Return whether the cell has been run with these settings.

        Raises:
            StartError: as `load`.
        """
        document = self._document(cell)
        if document is None:
            return False
        settings = dict(document["settings"])
        return self._model in {None, settings.pop("model")} and cell.has_settings(settings)

    def pack(self, cells: Iterable[Cell]) -> None:
        """Gather the records of a study's cells in its table, and remove their files."""
        found = [(cell, self._document(cell)) for cell in sorted(cells, key=lambda at: at.name)]
        packed = [(cell, document) for cell, document in found if document is not None]
        self._folder.mkdir(parents=True, exist_ok=True)
        _write(self._table, bz2.compress(_table_text(each for _, each in packed).encode()))
        for cell, _ in packed:
            self._path(cell).unlink(missing_ok=True)

    def _document(self, cell: Cell) -> _Document | None:
        """Return the record at a cell's place as it was written, or None."""
        path = self._path(cell)
        if path.exists():
            try:
                document: _Document = json.loads(path.read_bytes())
            except ValueError as error:
                raise _no_records(path, error) from None
            return document
        if not self._table.exists():
            return None
        place = cell.method, cell.lag, cell.learning_rate, cell.seed
        return _read_table(self._table, self._table.stat().st_mtime_ns).get(place)

    def _path(self, cell: Cell) -> Path:
        return self._folder / "cells" / f"{cell.name}.json"

    def _error_path(self, cell: Cell) -> Path:
        return self._folder / "cells" / f"{cell.name}.error"


def table_records(path: Path) -> list[CellRecord]:
    """Return all records of a study's table.

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
    columns = [[name, [at["steps"].get(name) for at in records]] for name in _DIGITS]
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


def _no_records(path: Path, error: Exception) -> StartError:
    return StartError(f"{path} holds no records ({error}); delete it to run its cells again")


def _line(content: object) -> str:
    return json.dumps(content, separators=(",", ":")) + "\n"


def _write(path: Path, content: bytes) -> None:
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
    return columns


def _read_columns(columns: Mapping[str, Any], trajectories: int) -> StepColumns:
    shares = columns.get("ess", columns["ess_ratio"])
    rates = columns.get("learning_rate")
    return StepColumns(
        ess_ratio=tuple(columns["ess_ratio"]),
        on_policy_ess_ratio=tuple(columns["on_policy_ess_ratio"]),
        ess=tuple(None if each is None else each * trajectories for each in shares),
        gradient_norm=tuple(columns["gradient_norm"]),
        learning_rate=None if rates is None else tuple(rates),
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")
