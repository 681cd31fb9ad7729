"""One family's row: every question is asked in a process of its own, and every answer is a cell."""

import logging
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft  # noqa: F401 - once for all forks: it takes as long as a family
import torch
import transformers

from benchmarks.harness.apart import run_apart
from benchmarks.model_families.families import Family
from benchmarks.model_families.learner_side import (
    Reference,
    norms_difference,
    random_trajectories,
    rows_difference,
)
from benchmarks.model_families.ranks_side import ranks_difference
from benchmarks.model_families.sampler_side import engine_difference
from benchmarks.model_families.table import COLUMNS, Cell, Column, Row, Verdict, judge
from benchmarks.model_families.tiny_model import save_model
from vcpo.api.workloads import EngineName
from vcpo.service.lifecycle import StartError

_BY_NAME = {column.name: column for column in COLUMNS}
_IN_ONE_PROCESS = ("hf", "padded", "packed", "norms", "LoRA")
"""Columns of one process; it takes seconds to make a model and to fork."""


def judge_family(
    family: Family, columns: frozenset[str], limit_s: float, before: Row | None = None
) -> Row:
    """Return the cells of the given columns.

    limit_s: of each of the processes. before: the row on the page; ranks are asked for the norms
    that the family has.
    """
    row: dict[str, Cell] = {}
    with TemporaryDirectory(prefix="vcpo-family-") as name:
        folder = Path(name)
        groups = [columns.intersection(_IN_ONE_PROCESS), *({each} for each in ("ranks", "vllm"))]
        for group in groups:
            wanted = sorted(columns & group, key=list(_BY_NAME).index)
            if wanted:
                row |= _judged_apart(family, folder, wanted, {**(before or {}), **row}, limit_s)
    return row


def _judged_apart(
    family: Family, folder: Path, columns: list[str], row: Row, limit_s: float
) -> dict[str, Cell]:
    """Judge columns in a process of its own; what it could not answer is wrong."""
    found = run_apart(partial(_cells, family, folder, columns, row), limit_s)
    found.pop("seconds")
    reason = found.pop("error", None) or found.pop("stopped", None) or "no answer"
    lost = Cell(verdict=Verdict.WRONG, reason=str(reason))
    return {column: found.get(column, lost) for column in columns}


def _cells(
    family: Family, folder: Path, columns: list[str], row: Row
) -> Iterator[Mapping[str, Any]]:
    """Yield cells by column."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if not (folder / "config.json").exists():
        save_model(family, folder)
    for name, ask in _questions(family, folder, columns, row).items():
        yield {name: _cell(_BY_NAME[name], folder, ask)}


def _questions(
    family: Family, folder: Path, columns: list[str], row: Row
) -> dict[str, Callable[[], float]]:
    """What to ask, by column."""
    questions: dict[str, Callable[[], float]] = {}
    if {"padded", "packed", "norms"}.intersection(columns):
        reference = Reference(folder, family.reference, random_trajectories())
        questions = {
            layout: partial(rows_difference, folder, layout, reference)
            for layout in ("padded", "packed")
        }
        questions["norms"] = partial(norms_difference, folder, reference)
    has_norms = row.get("norms", Cell(verdict=Verdict.AGREES)).verdict is Verdict.AGREES
    questions |= {
        "hf": partial(engine_difference, folder, EngineName.HF),
        "vllm": partial(engine_difference, folder, EngineName.VLLM),
        "LoRA": partial(engine_difference, folder, EngineName.HF, adapters=True),
        "ranks": partial(ranks_difference, folder, "vcpo" if has_norms else "grpo"),
    }
    return {name: questions[name] for name in columns}


def _cell(column: Column, folder: Path, ask: Callable[[], float]) -> Cell:
    """Ask; an error that tells the user what to correct is a refusal, any other one is wrong."""
    try:
        return judge(column, ask())
    except Exception as error:  # noqa: BLE001 - the code of any model runs there
        reason = _general(str(error), folder)
        is_refusal = isinstance(error, StartError | ValueError) and reason.startswith("spec.")
        if is_refusal:
            return Cell(verdict=Verdict.REFUSED, reason=reason)
        return Cell(verdict=Verdict.WRONG, reason=f"{type(error).__name__}: {reason}")


def _general(message: str, folder: Path) -> str:
    text = textwrap.shorten(message.replace(str(folder), "MODEL"), 600, placeholder=" ...")
    text = re.sub(r"\b\w+(ForCausalLM|LMHeadModel)\b", "the model", text)
    return re.sub(r"\ba \S+ model with", "a model with", text)
