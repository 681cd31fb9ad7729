"""Questions from a data set: read once, kept apart by split, shuffled by the run's seed."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Final

from vcpo_rollout.environments.draws import split_of
from vcpo_rollout.environments.environment import Prompt, Split

Row = Mapping[str, Any]

_EVALUATION_NAMES: Final = ("test", "validation", "evaluation")
"""Splits that stand for evaluation; the first that a data set has is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Where a data set is found, and which of its columns are read."""

    hub_name: str
    """Name on the Hugging Face hub, for a run that gives no path."""
    hub_config: str
    columns: tuple[str, str]
    """Columns of text that every row must have: the question, and what ends in the answer."""


class Questions:
    """The items of a data set by split and index.

    Index i is item i of a shuffled list; behind its end stands the list again, shuffled anew, so
    that every item is met once before any is met twice.
    """

    def __init__(self, items: Mapping[Split, Sequence[Prompt]], *, seed: int) -> None:
        self._items = items
        self._seed = seed
        self._order = lru_cache(maxsize=4)(self._shuffled)

    def at(self, split: Split, index: int) -> Prompt:
        """Return item `index` (>= 0) of a split.

        Raises: ValueError when the index is negative or the split has no item.
        """
        items = self._items[split]
        if not items:
            raise ValueError(
                f"environment.parameters.path: the data set has no item for {split}; "
                "give a larger one, or a folder with files train.* and test.*"
            )
        if index < 0:
            raise ValueError(f"index: {index} is negative; prompts are numbered from 0")
        turn, place = divmod(index, len(items))
        return items[self._order(split, turn)[place]]

    def _shuffled(self, split: Split, turn: int) -> list[int]:
        order = list(range(len(self._items[split])))
        Random(f"{self._seed}/{split}/{turn}").shuffle(order)  # noqa: S311 - repeatable on purpose
        return order


def load_questions(
    data_set: DataSet,
    path: str | None,
    make_prompt: Callable[[Row], Prompt | None],
    *,
    seed: int,
) -> Questions:
    """Read a data set from a file, a folder, or the hub when `path` is None.

    A `.jsonl` file holds one JSON object per line. Everything else is read by `datasets`: a
    `.parquet` file, or a folder whose files say in their names which split they hold.
    Of a data set with a split for evaluation the rest is trained on, but for questions that stand
    in both; of one without, a tenth is kept for evaluation, by a hash of the question.

    make_prompt: makes an item of a row, or None of one that holds no answer.
    Raises: ValueError, naming the parameter, the row and the column, when something is missing.
    """
    source = data_set.hub_name if path is None else path
    splits = _read(data_set, path)
    named = next((name for name in _EVALUATION_NAMES if name in splits and len(splits) > 1), None)
    items: dict[Split, dict[str, Prompt]] = {split: {} for split in Split}
    for name, rows in splits.items():
        place = f"{source!r}, {name}"
        for question, prompt in _prompts(rows, data_set.columns, place, make_prompt):
            split = _named_split(name, named) if named else split_of(question)
            items[split][question] = prompt
    for question in items[Split.EVALUATION]:
        items[Split.TRAIN].pop(question, None)
    return Questions({split: tuple(found.values()) for split, found in items.items()}, seed=seed)


def _named_split(name: str, evaluation_name: str) -> Split:
    return Split.EVALUATION if name == evaluation_name else Split.TRAIN


def _prompts(
    rows: Iterable[Row],
    columns: Sequence[str],
    place: str,
    make_prompt: Callable[[Row], Prompt | None],
) -> Iterable[tuple[str, Prompt]]:
    """Each row's question and what was made of it."""
    for number, row in enumerate(rows, start=1):
        for column in columns:
            if not isinstance(row.get(column), str):
                raise ValueError(  # noqa: TRY004 - what a user wrote, not a caller
                    f"environment.parameters.path: {place}, row {number} has no text in column "
                    f"{column!r} (its columns are {', '.join(map(repr, row)) or 'none'}); "
                    f"the task reads the columns {', '.join(columns)}"
                )
        prompt = make_prompt(row)
        if prompt is None:
            raise ValueError(
                f"environment.parameters.path: {place}, row {number} holds no answer where the "
                f"data set has it, at the end of column {columns[-1]!r}: {row[columns[-1]]!r:.120}"
            )
        yield row[columns[0]].strip(), prompt


def _read(data_set: DataSet, path: str | None) -> Mapping[str, Iterable[Row]]:
    """Rows by the name of their split."""
    if path is None:
        return _from_library(data_set.hub_name, name=data_set.hub_config)
    place = Path(path)
    if not place.exists():
        raise ValueError(
            f"environment.parameters.path: {path!r} does not exist here ({Path.cwd()}); "
            "give a .jsonl or .parquet file or a folder that the workers can read"
        )
    if place.is_dir():
        return _from_library(str(place))
    if place.suffix == ".jsonl":
        return {"train": _json_lines(place)}
    if place.suffix == ".parquet":
        return _from_library("parquet", data_files=str(place))
    raise ValueError(
        f"environment.parameters.path: {path!r} is neither .jsonl nor .parquet nor a folder; "
        "convert it to one JSON object per line"
    )


def _json_lines(path: Path) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line) if line.strip() else {}
        except ValueError as error:
            raise ValueError(
                f"environment.parameters.path: '{path}', line {number} is not JSON ({error}); "
                "write one JSON object per line"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(  # noqa: TRY004 - what a user wrote, not a caller
                f"environment.parameters.path: '{path}', line {number} is no JSON object; "
                "write one JSON object per line"
            )
        if row:
            rows.append(row)
    return rows


def _from_library(source: str, **arguments: str) -> Mapping[str, Iterable[Row]]:
    # Imported on demand: it takes a second, and a .jsonl file does without.
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            "environment.parameters.path: only .jsonl files are read without the package "
            "datasets; install it in the rollout image: pip install 'vcpo[rollout]'"
        ) from error
    try:
        found: Mapping[str, Iterable[Row]] = load_dataset(source, **arguments)
    except Exception as error:  # of the hub's client, of pyarrow, of a script in the data set
        raise ValueError(
            f"environment.parameters.path: {source!r} cannot be loaded "
            f"({type(error).__name__}: {error}); give the path of a local copy, "
            "or let the workers reach the hub"
        ) from error
    return found
