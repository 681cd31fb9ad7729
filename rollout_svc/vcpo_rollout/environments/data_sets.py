"""Questions of a data set: read once, divided into splits, shuffled by the run's seed."""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Final

from vcpo_rollout.environments.draws import position_of, split_of
from vcpo_rollout.environments.environment import Prompt, Split

Row = Mapping[str, Any]

_EVALUATION_NAMES: Final = ("test", "validation", "evaluation")
"""Names of evaluation splits; the first one that a data set has is used."""
_NAMES: Final = {str: "text", int: "number", list: "list of messages"}
_EXACT: Final = 2**53
"""Up to here a float is exactly one integer."""
_FIELD: Final = "environment.parameters.path"
_FILES_FIX: Final = "give whole files in UTF-8, each with a row at least"
_FORM: Final = "write one JSON object per line, in UTF-8"
_HUB_FIX: Final = "give the path of a local copy, or let the workers reach the hub"
_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Where to find a data set, and which columns to read, with the types of their values."""

    hub_name: str
    hub_config: str | None
    columns: tuple[str, ...]
    """The question, and the text that ends in the answer; as `column_of` reads them."""
    kinds: tuple[tuple[type, ...], ...] = ((str,), (str,))
    fix: str = ""
    """Which parameters choose the columns."""


class Questions:
    """The items of a data set by split and index: each once, in the seed's order, then again."""

    def __init__(
        self, items: Mapping[Split, Sequence[Prompt]], *, seed: int, num_apart: int = 0
    ) -> None:
        training = items[Split.TRAIN]
        self.apart = training[:num_apart]
        """The first items for training, which no index gives."""
        self._items = {**items, Split.TRAIN: training[num_apart:]}
        for split, own in self._items.items():
            if not own:
                total = sum(map(len, items.values()))
                raise ValueError(
                    f"environment.parameters: no item is left for {split}, of {total} in all; give"
                    " more rows with other questions"
                )
        self._seed = seed
        self._order = lru_cache(maxsize=4)(self._shuffle)

    def sizes_in_words(self, num_prompts: int) -> str:
        """Return how many distinct items there are; num_prompts: that a run takes to train on."""
        training, held_out = len(self._items[Split.TRAIN]), len(self._items[Split.EVALUATION])
        epochs = f"{num_prompts / training:,.1f} epochs"
        return f"rows      {training:,} to train on ({epochs}), {held_out:,} held out; all distinct"

    def at(self, split: Split, index: int) -> Prompt:
        if index < 0:
            raise ValueError(f"index: {index} is negative; prompts are numbered from 0")
        items = self._items[split]
        epoch, position = divmod(index, len(items))
        return items[self._order(split, epoch)[position]]

    def _shuffle(self, split: Split, epoch: int) -> list[int]:
        order = list(range(len(self._items[split])))
        Random(f"{self._seed}/{split}/{epoch}").shuffle(order)  # noqa: S311 - repeatable on purpose
        return order


def load_questions(
    data_set: DataSet,
    path: str | None,
    make_prompt: Callable[[Row], Prompt | None],
    *,
    seed: int,
    num_apart: int = 0,
) -> Questions:
    """Read a data set from a file, a folder, or the hub when `path` is None.

    If it has an evaluation split, all other questions are for training, except those that are in
    both. Otherwise a tenth is for evaluation, by a hash of the question, and one at least. Rows
    with one question stay in one split. A row that equals another is left out, with a warning.

    make_prompt: makes an item from a row; None means that the row has no answer.
    """
    source = data_set.hub_name if path is None else path
    splits = _read(data_set, path)
    named = next((name for name in _EVALUATION_NAMES if name in splits and len(splits) > 1), None)
    items: dict[Split, dict[str, dict[bytes, Prompt]]] = {split: {} for split in Split}
    num_rows = 0
    for name, rows in splits.items():
        place = f"{source!r}, {name}"
        for question, row, prompt in _prompts(rows, data_set, place, make_prompt):
            num_rows += 1
            split = split_of(question)
            if named:
                split = Split.EVALUATION if name == named else Split.TRAIN
            items[split].setdefault(question, {}).setdefault(row, prompt)
    if not items[Split.EVALUATION] and len(items[Split.TRAIN]) > 1:
        held_out = min(items[Split.TRAIN], key=position_of)
        items[Split.EVALUATION][held_out] = items[Split.TRAIN].pop(held_out)
    found = {
        split: tuple(prompt for alike in questions.values() for prompt in alike.values())
        for split, questions in items.items()
    }
    asked = {prompt.text.strip() for prompt in found[Split.EVALUATION]}  # in whatever form
    found[Split.TRAIN] = tuple(
        prompt for prompt in found[Split.TRAIN] if prompt.text.strip() not in asked
    )
    if num_left_out := num_rows - sum(map(len, found.values())):
        _LOGGER.warning(
            "%s: %r: %d of %d rows are repeated, or ask what is held out too, and are left out",
            *(_FIELD, source, num_left_out, num_rows),
        )
    return Questions(found, seed=seed, num_apart=num_apart)


def column_of(row: Row, name: str) -> object:
    """Return a value of a row; of `a.b` what column `a` has under `b`. None if there is none."""
    if name in row or "." not in name:
        return row.get(name)
    first, _, rest = name.partition(".")
    below = row.get(first)
    return column_of(below, rest) if isinstance(below, Mapping) else None


def as_text(value: object) -> str:
    """Return a text or number as the user wrote it: 15.0 of a column with gaps is 15."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        return str(int(value))
    return str(value)


def _prompts(
    rows: Iterable[Row],
    data_set: DataSet,
    place: str,
    make_prompt: Callable[[Row], Prompt | None],
) -> Iterable[tuple[str, bytes, Prompt]]:
    """Yield question, digest and prompt of each row."""
    columns = data_set.columns
    for number, row in enumerate(rows, start=1):
        where = f"{_FIELD}: {place}, row {number}"
        values = [column_of(row, column) for column in columns]
        for column, value, kinds in zip(columns, values, data_set.kinds, strict=False):
            is_finite = not isinstance(value, float) or math.isfinite(value)
            if isinstance(value, kinds) and is_finite:
                continue
            wanted = " or ".join(_NAMES[kind] for kind in kinds if kind in _NAMES)
            found = f"it is {value!r:.80}; the columns are {', '.join(map(repr, row)) or 'none'}"
            fix = f"the task reads the columns {', '.join(columns)}{data_set.fix}"
            raise ValueError(f"{where} has no {wanted} in column {column!r} ({found}); {fix}")
        try:
            prompt = make_prompt(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if prompt is None:
            place = f"at the end of column {columns[-1]!r}, where the data set marks it"
            raise ValueError(f"{where} has no answer {place}: {values[-1]!r:.120}")
        question = values[0]
        key = question.strip() if isinstance(question, str) else json.dumps(question)
        content = json.dumps(row, sort_keys=True, default=str).encode()
        yield key, hashlib.blake2b(content).digest(), prompt


def _read(data_set: DataSet, path: str | None) -> Mapping[str, Iterable[Row]]:
    if path is None:
        return _from_library(
            data_set.hub_name, _HUB_FIX, path=data_set.hub_name, name=data_set.hub_config
        )
    place = Path(path)
    if not place.exists():
        fix = "give a .jsonl or .parquet file or a folder that the workers can read"
        here = f"working directory: {Path.cwd()}"
        raise ValueError(f"{_FIELD}: {path!r} does not exist ({here}); {fix}")
    if place.is_dir():
        return _from_library(path, _FILES_FIX, path=path)
    if place.suffix == ".jsonl":
        return {"train": _json_lines(place)}
    if place.suffix == ".parquet":
        return _from_library(path, _FILES_FIX, path="parquet", data_files=path)
    raise ValueError(f"{_FIELD}: {path!r} is neither .jsonl nor .parquet nor a folder; {_FORM}")


def _json_lines(path: Path) -> list[Row]:
    rows: list[Row] = []
    # Only a line feed ends a line: a JSON text may hold the other ends of Unicode.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            row = json.loads(text) if text.strip() else {}
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__}")  # noqa: TRY004, TRY301 - told below
        except (ValueError, RecursionError) as error:
            what = "in UTF-8" if isinstance(error, UnicodeDecodeError) else "a JSON object"
            raise ValueError(
                f"{_FIELD}: '{path}', line {number} is not {what} ({error}); {_FORM}"
            ) from error
        if row:
            rows.append(row)
    return rows


def _from_library(source: str, fix: str, **arguments: str | None) -> Mapping[str, Iterable[Row]]:
    """Return what `datasets` loads; `source` and `fix` are for errors."""
    # Imported on demand: the import takes a second, and a .jsonl file does not need it.
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"{_FIELD}: only .jsonl files are read without the package datasets ({error}); install"
            " it in the rollout image: pip install 'vcpo[rollout]'"
        ) from error
    try:
        found: Mapping[str, Iterable[Row]] = load_dataset(**arguments)
    except Exception as error:  # errors of the hub's client, of pyarrow, of a script
        why = error.__cause__ or error
        cause = f"{type(why).__name__}: {why}"
        raise ValueError(f"{_FIELD}: {source!r} cannot be loaded ({cause}); {fix}") from error
    return found
