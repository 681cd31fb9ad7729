"""Cells: a cell is one training run and its place in the grid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from vcpo.spec import VCPORunSpec
from vcpo_study.study import StudySpec, cell_spec

_FORMAT: Final = 3
"""Increases with every change of what a cell does or records, also of a run's defaults. Cells of
another format are run again."""
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
"""Sections of a run's spec on which a cell depends; the others are about processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run: a method at a lag, with a learning rate and a seed."""

    method: str
    lag: int
    """Age of every batch, in policy versions; the first batches are younger."""
    learning_rate: float
    seed: int
    spec: VCPORunSpec
    """The whole run; `model.name` as the study's file has it."""
    evaluation_seed: int
    """Draws the held-out prompts."""

    @property
    def name(self) -> str:
        """Name of the cell's file, unique in the study."""
        return f"{self.method}-k{self.lag}-lr{self.learning_rate:g}-s{self.seed}"

    @property
    def digest(self) -> str:
        """SHA-256 of all settings on which the cell's numbers depend; a model counts by its name.

        Settings at their defaults are left out, so that a new field leaves finished cells valid.
        """
        spec = self.spec.model_dump(
            mode="json", by_alias=True, include=_PARTS, exclude_defaults=True
        )
        document = {"format": _FORMAT, "evaluation_seed": self.evaluation_seed, "spec": spec}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of a grid to run; None selects all."""

    methods: frozenset[str] | None = None
    lags: frozenset[int] | None = None


def tuning_cells(study: StudySpec, selection: Selection) -> list[Cell]:
    """Return the cells that decide learning rates; none when the study does not tune."""
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
    """Return the cells of the grid, seed by seed, so that the first ones already cover it.

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
