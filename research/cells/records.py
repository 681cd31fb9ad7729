"""The records of cells: a file for each until a study is complete, and then one table for all.

`CellStore.pack` gathers the records of a study in `cells.jsonl.bz2` and removes their files, so
that a thousand cells fit into a repository. A failed cell leaves a file with its error, which is
removed once the cell succeeds.
"""

import bz2
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from research.cells.cell import Cell
from vcpo.service.lifecycle import StartError

DIGITS: Final = {
    **dict.fromkeys(("ess_ratio", "on_policy_ess_ratio", "ess"), 5),
    "gradient_norm": 2,
    "learning_rate": 3,
}
"""Significant digits of each number of a step. The early warning asks of the last two only how many
times larger they are than a threshold."""
_MODEL_FILES: Final = ("*.json", "*.py", "*.safetensors")

_Numbers = tuple[float, ...]
_Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """The numbers of a cell's steps: entry s - 1 of each tuple is of step s.

    A cell whose policy gave logits that are not finite took no further step.
    """

    ess_ratio: _Numbers
    """As the learning-rate rule reads it; 0 when a weight has no value."""
    on_policy_ess_ratio: _Numbers
    ess: tuple[float | None, ...]
    """Effective sample size, in trajectories; None when a weight has no value."""
    gradient_norm: _Numbers
    """Before clipping; 0 when there is none."""
    learning_rate: _Numbers | None
    """At which each step was taken, 0 of a skipped one; None in a table that has no such column."""


class EvaluationRow(NamedTuple):
    """Accuracy of one policy version on the held-out prompts, after so many steps.

    It is 0 where the policy's logits are not finite, and from there on.
    """

    step: int
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    """The record of a finished cell."""

    method: str
    lag: int
    learning_rate: float
    seed: int
    cpu_s: float
    """Processor time of training and evaluation, in seconds."""
    evaluations: tuple[EvaluationRow, ...]
    steps: StepColumns


class CellStore:
    """The folder with the records of a study's cells."""

    def __init__(self, folder: Path, *, model: str | None) -> None:
        """Use a folder.

        model: `model_identity` of the study's model; None, where it is not here, takes records of
            any model.
        """
        self._cells = folder / "cells"
        self._model = model
        self._table = folder / "cells.jsonl.bz2"

    def save(self, cell: Cell, record: CellRecord) -> None:
        """Write a cell's file atomically."""
        settings = {"settings": {**cell.settings, "model": self._model}}
        steps = _written_columns(record.steps, cell.spec.batch.trajectories)
        self._cells.mkdir(parents=True, exist_ok=True)
        _write(self._path(cell), _line({**settings, **asdict(record), "steps": steps}).encode())
        self._error_path(cell).unlink(missing_ok=True)

    def save_error(self, cell: Cell, error: str) -> None:
        """Write the error of a failed cell."""
        self._cells.mkdir(parents=True, exist_ok=True)
        self._error_path(cell).write_text(error, encoding="utf-8")

    def error(self, cell: Cell) -> str | None:
        """Return the error of a cell that failed when it was last run, or None."""
        path = self._error_path(cell)
        return path.read_text(encoding="utf-8") if path.exists() else None

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
        packed = sorted(cells, key=lambda at: at.name)
        documents = [each for each in map(self._document, packed) if each is not None]
        self._table.parent.mkdir(parents=True, exist_ok=True)
        _write(self._table, bz2.compress(_table_text(documents).encode()))
        for cell in packed:
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
        return self._cells / f"{cell.name}.json"

    def _error_path(self, cell: Cell) -> Path:
        return self._cells / f"{cell.name}.error"


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


def _table_text(records: list[_Document]) -> str:
    """Return the lines of a table: all records without their steps, then a line for each column.

    Equal columns of many cells side by side are smaller than cell after cell.
    """
    heads = [{key: value for key, value in at.items() if key != "steps"} for at in records]
    columns = [[name, [at["steps"].get(name) for at in records]] for name in DIGITS]
    return "".join(map(_line, [heads, *columns]))


@functools.lru_cache(maxsize=1)
def _read_table(path: Path, _changed_ns: int) -> Mapping[tuple[str, int, float, int], _Document]:
    """Return the records of a table by method, lag, learning rate and seed.

    The time of its last change tells tables apart.
    """
    try:
        heads, *columns = map(json.loads, bz2.decompress(path.read_bytes()).splitlines())
    except (OSError, ValueError) as error:
        raise _no_records(path, error) from None
    found = {}
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
        name: [None if each is None else float(f"{each:.{DIGITS[name]}g}") for each in values]
        for name, values in (asdict(steps) | {"ess": shares}).items()
        if values is not None
    }
    if columns["ess"] == columns["ess_ratio"]:
        del columns["ess"]
    return columns


def _record(document: _Document) -> CellRecord:
    settings, columns = document["settings"], document["steps"]
    trajectories = settings["batch.promptsPerStep"] * settings["batch.trajectoriesPerPrompt"]
    shares = columns.get("ess", columns["ess_ratio"])
    ess = [None if each is None else each * trajectories for each in shares]
    steps = {"learning_rate": None} | {at: tuple(each) for at, each in columns.items()}
    place = {name: document[name] for name in ("method", "lag", "learning_rate", "seed", "cpu_s")}
    return CellRecord(
        **place,
        steps=StepColumns(**(steps | {"ess": tuple(ess)})),
        evaluations=tuple(EvaluationRow(*each) for each in document["evaluations"]),
    )
