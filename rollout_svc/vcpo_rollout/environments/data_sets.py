"""Questions of a data set: read once, divided into splits, shuffled by the run's seed."""

import json
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Where to find a data set, and which columns to read."""

    hub_name: str
    """Name on the Hugging Face hub, for a run that gives no path."""
    hub_config: str | None
    columns: tuple[str, ...]
    """Columns that every row must have: the question, and the text that ends in the answer."""
    kinds: tuple[type, ...] = (str,)
    """Types of the values of these columns."""
    cure: str = ""
    """Which parameters choose the columns."""


class Questions:
    """The items of a data set by split and index.

    Index i is item i of a shuffled list; after its end the list repeats in a new order. Every item
    is thus used once before any is used twice.
    """

    def __init__(
        self, items: Mapping[Split, Sequence[Prompt]], *, seed: int, num_apart: int = 0
    ) -> None:
        training = items[Split.TRAIN]
        self.apart = training[:num_apart]
        """The first items for training, which no index gives."""
        self._items = {**items, Split.TRAIN: training[num_apart:]}
        self._seed = seed
        self._order = lru_cache(maxsize=4)(self._shuffle)

    def at(self, split: Split, index: int) -> Prompt:
        """Return item `index` (>= 0) of a split."""
        items = self._items[split]
        if not items:
            raise ValueError(
                f"environment.parameters.path: the data set has no item for {split}; "
                "give more rows, or a folder with files train.* and test.*"
            )
        if index < 0:
            raise ValueError(f"index: {index} is negative; prompts are numbered from 0")
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

    A `.jsonl` file has one JSON object per line. `datasets` reads everything else: a `.parquet`
    file, or a folder whose file names contain their split.
    If the data set has an evaluation split, all other questions are for training, except those that
    are in both. Otherwise a tenth is for evaluation, by a hash of the question, and one at least.

    make_prompt: makes an item from a row; None means that the row has no answer.
    """
    source = data_set.hub_name if path is None else path
    splits = _read(data_set, path)
    named = next((name for name in _EVALUATION_NAMES if name in splits and len(splits) > 1), None)
    items: dict[Split, dict[str, Prompt]] = {split: {} for split in Split}
    for name, rows in splits.items():
        place = f"{source!r}, {name}"
        for question, prompt in _prompts(rows, data_set, place, make_prompt):
            split = split_of(question)
            if named:
                split = Split.EVALUATION if name == named else Split.TRAIN
            items[split][question] = prompt
    if not items[Split.EVALUATION] and len(items[Split.TRAIN]) > 1:
        held_out = min(items[Split.TRAIN], key=position_of)
        items[Split.EVALUATION][held_out] = items[Split.TRAIN].pop(held_out)
    for question in items[Split.EVALUATION]:
        items[Split.TRAIN].pop(question, None)
    found = {split: tuple(prompts.values()) for split, prompts in items.items()}
    return Questions(found, seed=seed, num_apart=num_apart)


def _prompts(
    rows: Iterable[Row],
    data_set: DataSet,
    place: str,
    make_prompt: Callable[[Row], Prompt | None],
) -> Iterable[tuple[str, Prompt]]:
    """Yield the question and the prompt of each row."""
    columns = data_set.columns
    wanted = "text" if data_set.kinds == (str,) else "text, number or messages"
    for number, row in enumerate(rows, start=1):
        for column in columns:
            if not isinstance(row.get(column), data_set.kinds):
                raise ValueError(  # noqa: TRY004 - a user wrote it
                    f"environment.parameters.path: {place}, row {number} has no {wanted} in column "
                    f"{column!r} (its columns are {', '.join(map(repr, row)) or 'none'}); "
                    f"the task reads the columns {', '.join(columns)}{data_set.cure}"
                )
        try:
            prompt = make_prompt(row)
        except ValueError as error:
            raise ValueError(
                f"environment.parameters.path: {place}, row {number}: {error}"
            ) from error
        if prompt is None:
            raise ValueError(
                f"environment.parameters.path: {place}, row {number} has no answer at "
                f"the end of column {columns[-1]!r}, where the data set marks it: "
                f"{row[columns[-1]]!r:.120}"
            )
        question = row[columns[0]]
        yield question.strip() if isinstance(question, str) else json.dumps(question), prompt


def _read(data_set: DataSet, path: str | None) -> Mapping[str, Iterable[Row]]:
    """Return the rows by the name of their split."""
    if path is None:
        return _from_library(data_set.hub_name, name=data_set.hub_config)
    place = Path(path)
    if not place.exists():
        raise ValueError(
            f"environment.parameters.path: {path!r} does not exist (working directory: "
            f"{Path.cwd()}); give a .jsonl or .parquet file or a folder that the workers can read"
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
            raise ValueError(  # noqa: TRY004 - a user wrote it
                f"environment.parameters.path: '{path}', line {number} is not a JSON object; "
                "write one JSON object per line"
            )
        if row:
            rows.append(row)
    return rows


def _from_library(source: str, **arguments: str | None) -> Mapping[str, Iterable[Row]]:
    # Imported on demand: the import takes a second, and a .jsonl file does not need it.
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            "environment.parameters.path: only .jsonl files are read without the package "
            f"datasets ({error}); install it in the rollout image: pip install 'vcpo[rollout]'"
        ) from error
    try:
        found: Mapping[str, Iterable[Row]] = load_dataset(source, **arguments)
    except (
        Exception
    ) as error:  # errors of the hub's client, of pyarrow, of a script in the data set
        raise ValueError(
            f"environment.parameters.path: {source!r} cannot be loaded "
            f"({type(error).__name__}: {error}); give the path of a local copy, "
            "or let the workers reach the hub"
        ) from error
    return found
