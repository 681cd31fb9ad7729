"""Cells: one training run of the grid each, and where it stands in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from vcpo.spec import VCPORunSpec
from vcpo_study.study import StudySpec, cell_spec

_FORMAT: Final = 3
"""Counts changes of what a cell does or records, defaults of a run included; cells of another
format are run again."""
_PARTS: Final = {
    "model",
    "environment",
    "steps",
    "seed",
    "algorithm",
    "batch",
    "sampling",
    "optimizer",
    "evaluation",
    "learner",
}
"""What a cell depends on; the rest of a run's spec is about processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run: a method at a lag, with a learning rate and a seed."""

    method: str
    lag: int
    """Age of every batch, in policy versions, once there are as many."""
    learning_rate: float
    seed: int
    spec: VCPORunSpec
    """Everything about the run; `model.name` as the study's file has it."""
    evaluation_seed: int
    """Draws the held-out prompts."""

    @property
    def name(self) -> str:
        """Unique in the study; names the cell's file."""
        return f"{self.method}-k{self.lag}-lr{self.learning_rate:g}-s{self.seed}"

    @property
    def digest(self) -> str:
        """SHA-256 of all settings that the cell's numbers depend on; models go by their name.

        Settings at their defaults are left out: a field that is new leaves finished cells valid.
        """
        spec = self.spec.model_dump(
            mode="json", by_alias=True, include=_PARTS, exclude_defaults=True
        )
        document = {"format": _FORMAT, "evaluation_seed": self.evaluation_seed, "spec": spec}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which part of a grid to run; None is all."""

    methods: frozenset[str] | None = None
    lags: frozenset[int] | None = None


def tuning_cells(study: StudySpec, selection: Selection) -> list[Cell]:
    """Cells that decide on learning rates; none when the study does not tune."""
    tuning = study.tuning
    if tuning is None:
        return []
    return [
        _cell(study, method, tuning.lag, rate, seed)
        for seed in tuning.seeds
        for rate in tuning.learning_rates
        for method in _methods(study, selection)
    ]


def grid_cells(
    study: StudySpec, selection: Selection, learning_rates: Mapping[str, float]
) -> list[Cell]:
    """Cells of the grid, seed by seed, so that a part of them already shows all of it.

    learning_rates: by method; a method without one is left out.
    """
    return [
        _cell(study, method, lag, learning_rates[method], seed)
        for seed in study.seeds
        for lag in study.lags
        if selection.lags is None or lag in selection.lags
        for method in _methods(study, selection)
        if method in learning_rates
    ]


def _methods(study: StudySpec, selection: Selection) -> Iterable[str]:
    wanted = selection.methods
    names = (method.name for method in study.methods)
    return [name for name in names if wanted is None or name in wanted]


def _cell(study: StudySpec, name: str, lag: int, learning_rate: float, seed: int) -> Cell:
    method = study.method(name)
    spec = cell_spec(study, method, lag=lag, learning_rate=learning_rate, seed=seed)
    return Cell(
        method=name,
        lag=lag,
        learning_rate=learning_rate,
        seed=seed,
        spec=spec,
        evaluation_seed=study.run.seed,
    )
