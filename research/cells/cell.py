"""Cells: a cell is one training run, a method at a lag with a learning rate and a seed."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from research.study import Ages, StudyMethod, StudySpec, cell_spec
from vcpo.algo.methods import LossConfig
from vcpo.api import VCPORunSpec
from vcpo.api.workloads import Precision

Settings = Mapping[str, Any]
"""Settings by dotted name, as JSON values."""

_FORMAT: Final = 4
"""Increases with a change of what a cell does; cells of another format are run again."""
_PARTS: Final = {
    *("environment", "steps", "seed", "algorithm", "batch"),
    *("sampling", "optimizer", "evaluation", "learner"),
}
"""Sections of a run's spec on which a cell depends. The others are about processes, but for the
model, which counts by its content; see `records.CellStore`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run: a method at a lag, with a learning rate and a seed."""

    method: str
    lag: int
    """Age of every batch, in policy versions; the first batches are younger. With `ages`, the
    largest one."""
    learning_rate: float
    seed: int
    spec: VCPORunSpec
    """The whole run; `model.name` as the study's file has it."""
    evaluation_seed: int
    """Draws the held-out prompts."""
    hold_rate_at_step: int | None = None
    """As in `StudyMethod`."""
    fixed_target: bool = False
    ages: Ages | None = None
    """As in `StudySpec`."""

    @property
    def name(self) -> str:
        return f"{self.method}-k{self.lag}-lr{self.learning_rate:g}-s{self.seed}"

    @property
    def settings(self) -> Settings:
        """Every setting on which the cell's numbers depend, also those at their defaults.

        The stages of the loss are among them: they may change while the method's name stays.
        """
        loss = asdict(self.spec.algorithm.loss_config)
        return self._document(_section(self.spec, with_defaults=True), loss)

    def has_settings(self, recorded: Settings) -> bool:
        """Return whether a record with these settings is one of this cell.

        A setting that the record does not name is newer than the record; it must be at its default
        then. A field of runs that only the record names is gone since, and is not compared.
        """
        own = self.settings
        loss = asdict(self.spec.algorithm.loss_config).items() - asdict(LossConfig()).items()
        given = self._document(_section(self.spec, with_defaults=False), dict(loss))
        return given.keys() <= recorded.keys() and all(
            own[name] == value if name in own else "." in name for name, value in recorded.items()
        )

    def _document(self, spec: Mapping[str, Any], loss: Mapping[str, Any]) -> Settings:
        document = {
            "format": _FORMAT,
            "evaluation_seed": self.evaluation_seed,
            **dict(_flattened(spec, "")),
            **{f"loss.{name}": value for name, value in loss.items()},
        }
        if self.hold_rate_at_step is not None:
            document["hold_rate_at_step"] = self.hold_rate_at_step
        if self.lag > 0 and self.spec.algorithm.trust_region and not self.fixed_target:
            document["target_follows_surprisal"] = True
        if self.ages is not None:
            document["ages"] = self.ages.model_dump(mode="json", by_alias=True)
        if sampler := _sampler(self.spec):
            document["sampler"] = sampler
        if (lora := self.spec.model.lora) is not None:
            document["lora"] = lora.model_dump(mode="json", by_alias=True)
        settings: Settings = json.loads(json.dumps(document))
        return settings


def _section(spec: VCPORunSpec, *, with_defaults: bool) -> Mapping[str, Any]:
    return spec.model_dump(
        mode="json", by_alias=True, include=_PARTS, exclude_defaults=not with_defaults
    )


def _sampler(spec: VCPORunSpec) -> Mapping[str, Any]:
    """Return how the sampler differs from the learner: number formats and noise, if it does."""
    group = spec.rollouts[0]
    fields = group.model_dump(
        mode="json", by_alias=True, include={"quantization", "noise"}, exclude_defaults=True
    )
    is_half = group.number_format is Precision.BFLOAT16
    return {**fields, "precision": group.number_format.value} if is_half else fields


def _flattened(document: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield every value that is no mapping, by its dotted name."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def tuning_cells(study: StudySpec) -> list[Cell]:
    """Return the cells that decide the synchronous rates, seed by seed."""
    return [
        _cell(study, method, 0, rate, seed)
        for seed in study.tuning_seeds
        for rate in study.learning_rates
        for method in study.methods
    ]


def plane_cells(study: StudySpec) -> list[Cell]:
    """Return the cells of the plane, seed by seed: a study that is stopped early covers it."""
    return [
        _cell(study, method, lag, rate, seed)
        for seed in (*study.tuning_seeds, *study.all_seeds)
        for lag in study.lags
        for rate in study.learning_rates
        for method in study.methods
        if study.plane_has_seed(method.name, lag, seed)
    ]


def claims_cells(study: StudySpec, synchronous_rates: Mapping[str, float]) -> list[Cell]:
    """Return the cells of the claims, seed by seed.

    synchronous_rates: by method; a method without one is left out.
    """
    claims = study.claims
    if claims is None:
        return []
    return [
        _cell(study, method, lag, synchronous_rates[method.name], seed)
        for seed in claims.all_seeds
        for lag in claims.lags
        for method in study.methods
        if claims.methods is None or method.name in claims.methods
        if method.name in synchronous_rates and claims.has_seed(method.name, lag, seed)
    ]


def _cell(study: StudySpec, method: StudyMethod, lag: int, learning_rate: float, seed: int) -> Cell:
    spec = cell_spec(study, method, lag=lag, learning_rate=learning_rate, seed=seed)
    return Cell(
        method=method.name,
        lag=lag,
        learning_rate=learning_rate,
        seed=seed,
        spec=spec,
        evaluation_seed=study.run.seed,
        hold_rate_at_step=method.hold_rate_at_step,
        fixed_target=method.fixed_target,
        ages=study.ages,
    )
