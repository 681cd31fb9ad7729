"""The study file: what all cells have in common, and how they differ.

A study asks what becomes of a synchronous recipe as its data grows old. It has three parts, whose
cells are of one kind, a base run with one method, lag, learning rate and seed:

    tuning   every method and learning rate at lag 0, on seeds of its own; decides the synchronous
             rate of each method
    plane    every method, learning rate and lag, on few seeds; at lag 0 the cells of the tuning
    claims   methods at their synchronous rates over some lags, on many seeds
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from vcpo.api import (
    API_VERSION,
    GpuUse,
    SpecError,
    VCPORun,
    VCPORunSpec,
    load_document,
    with_gpu_defaults,
)
from vcpo.api.errors import field_path, problems_of
from vcpo.api.fields import DnsLabel, Section, conflict, refuse
from vcpo.api.run import Metadata
from vcpo.local.models import model_problems
from vcpo.local.preflight import with_local_paths

KIND: Final = "VCPOStudy"
LAG_FIELD: Final = "maxPolicyLagSteps"
RATE_FIELD: Final = "learningRate"

_Lag = Annotated[int, Field(ge=0, le=1024)]
_Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Rate = Annotated[float, Field(gt=0.0, le=1.0)]
_SET_BY_STUDY: Final = "is set by the study; remove it and use `lags`"
_RATE_SET_BY_STUDY: Final = "is set by the study; remove it and use `learningRates`"
_Share = Annotated[float, Field(ge=0.0, le=1.0)]
_Number = TypeVar("_Number", int, float)


def _distinct(numbers: tuple[_Number, ...]) -> tuple[_Number, ...]:
    if len(set(numbers)) < len(numbers):
        raise PydanticCustomError("conflict", "holds a number twice")
    return numbers


_Lags = Annotated[tuple[_Lag, ...], Field(min_length=1, max_length=32), AfterValidator(_distinct)]
_Seeds = Annotated[tuple[_Seed, ...], Field(min_length=1, max_length=64), AfterValidator(_distinct)]
_Rates = Annotated[tuple[_Rate, ...], Field(min_length=1, max_length=32), AfterValidator(_distinct)]
_Methods = Annotated[tuple[DnsLabel, ...], Field(min_length=1, max_length=32)]


class StudyMethod(Section):
    """One method: a name, and the fields of a run that it sets."""

    name: DnsLabel
    """Name of the method, unique in the study; part of the names of the cells' files."""
    title: Annotated[str, Field(min_length=1, max_length=40)] | None = None
    """Name in tables and figures; None uses `name`."""
    algorithm: Annotated[dict[str, Any], Field(max_length=64)] = Field(default={})
    """Fields of a run's `algorithm`; they override those of `run`."""
    optimizer: Annotated[dict[str, Any], Field(max_length=64)] = Field(default={})
    """Fields of a run's `optimizer`, without the learning rate; they override those of `run`."""
    hold_rate_at_step: Annotated[int, Field(ge=1)] | None = None
    """A control: from this step on the trust region holds the rate that it allowed then; None lets
    it go on."""
    fixed_target: bool = False
    """A control: the trust region takes all tokens for sure, however uncertain they are."""

    @model_validator(mode="after")
    def _leaves_the_axes_alone(self) -> Self:
        axes = (
            ("algorithm", self.algorithm, LAG_FIELD, _SET_BY_STUDY),
            ("optimizer", self.optimizer, RATE_FIELD, _RATE_SET_BY_STUDY),
        )
        refuse(
            conflict(section, field, value=fields[field], message=message)
            for section, fields, field, message in axes
            if field in fields
        )
        return self

    @property
    def label(self) -> str:
        return self.title or self.name


class Tuning(Section):
    """How each method gets its synchronous rate: the best of `learningRates` at lag 0."""

    seeds: _Seeds
    """Seeds of all cells of plane and tuning at lag 0; neither stale cells nor claims use them."""


class Ages(Section):
    """Ages of the data of a cell, where they are not all its lag."""

    shares: Annotated[tuple[_Share, ...], Field(min_length=1, max_length=4096)]
    """Ages over the lag. Each draw takes one of them with equal chance, and rounds it to whole
    versions."""
    drawn_for: Literal["batch", "group"] = "group"
    """What has one age: a batch, or the responses to one prompt."""
    tokens_per_version: Annotated[int, Field(ge=1)] | None = None
    """Tokens after which the sampler goes on with the next version, as it does in a run; None
    samples a response with one version. For tasks of one turn."""


class MoreSeeds(Section):
    """Seeds beside those of a whole part, where chance has to be smaller."""

    seeds: _Seeds
    """Seeds that the part does not have anyway, and the tuning neither."""
    lags: _Lags | None = None
    """Lags of the part; None takes all."""
    methods: _Methods | None = None
    """Names of methods of the part; None takes all."""

    def has_seed(self, method: str, lag: int, seed: int) -> bool:
        """Return whether a method has a seed at a lag."""
        return (
            seed in self.seeds
            and (self.lags is None or lag in self.lags)
            and (self.methods is None or method in self.methods)
        )


class _SeededPart(Section):
    """A part of a study that has seeds at several lags."""

    lags: _Lags
    """Age of every batch of a cell, in policy versions; the first batches are younger. 0 must be
    among them."""
    seeds: _Seeds
    """Seeds of training prompts and sampling. Those of the plane are for the lags beyond 0; claims
    may have the same ones."""
    more_seeds: Annotated[tuple[MoreSeeds, ...], Field(max_length=32)] = ()
    """Seeds of some of the lags and methods only; of the plane, at lags beyond 0."""

    @property
    def all_seeds(self) -> tuple[int, ...]:
        more = (seed for each in self.more_seeds for seed in each.seeds)
        return tuple(dict.fromkeys((*self.seeds, *more)))

    def has_seed(self, method: str, lag: int, seed: int) -> bool:
        has_more = any(more.has_seed(method, lag, seed) for more in self.more_seeds)
        return lag in self.lags and (seed in self.seeds or has_more)


class Claims(_SeededPart):
    """Cells at each method's synchronous rate, on more seeds than the plane."""

    methods: _Methods | None = None
    """Names of methods; None takes all."""


class StudySpec(_SeededPart):
    """The parts of a study, and what its cells have in common; lags and seeds are the plane's."""

    run: VCPORunSpec
    """The base run. Its `seed` draws the held-out prompts, which are equal for all cells."""
    methods: Annotated[tuple[StudyMethod, ...], Field(min_length=1, max_length=32)]
    learning_rates: _Rates
    """Candidates, the same for every method; half-decades from too low to one above the best."""
    ages: Ages | None = None
    """None: every batch is as old as the lag says."""
    tuning: Tuning | None = None
    """None: the study is a condition, in which methods are compared at rates that another study
    found, without a lag of 0."""
    development_seeds: Annotated[tuple[_Seed, ...], Field(max_length=64)] = ()
    """Seeds of the plane on which settings of a method were chosen. The plane shows them, and
    neither safe rates nor gaps between methods count them."""
    claims: Claims | None = None
    """None makes no cells beside plane and tuning."""
    subject: DnsLabel
    """Name of the method that the headline numbers describe."""

    @field_validator("run")
    @classmethod
    def _cells_support_the_run(cls, run: VCPORunSpec) -> VCPORunSpec:
        pool, groups = run.batch.prompt_pool, len(run.rollouts)
        one, gone = "a cell has one sampler; keep one group", "a study's prompts never come again"
        lag, rate = run.algorithm.max_policy_lag_steps, run.optimizer.learning_rate
        is_set = run.algorithm.model_fields_set, run.optimizer.model_fields_set
        rows = [
            ("max_policy_lag_steps" in is_set[0], ("algorithm", LAG_FIELD), lag, _SET_BY_STUDY),
            ("learning_rate" in is_set[1], ("optimizer", RATE_FIELD), rate, _RATE_SET_BY_STUDY),
            (groups > 1, ("rollouts",), groups, one),
            (pool is not None, ("batch", "promptPool"), pool, f"{gone}; remove it"),
        ]
        refuse(
            conflict(*location, value=value, message=message)
            for is_wrong, location, value, message in rows
            if is_wrong
        )
        return run

    @field_validator("methods")
    @classmethod
    def _names_differ(cls, methods: tuple[StudyMethod, ...]) -> tuple[StudyMethod, ...]:
        names = [method.name for method in methods]
        message = "another method has this name; give each its own"
        refuse(
            conflict(index, "name", value=name, message=message)
            for index, name in enumerate(names)
            if name in names[:index]
        )
        return methods

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        conflicts = [*self._unknown(), *self._wrong_lags(), *self._shared_seeds()]
        for index, method in enumerate(self.methods):
            try:
                cell = cell_spec(self, method, lag=0, learning_rate=1e-6, seed=self.seeds[0])
            except ValidationError as error:
                conflicts += _problems_of_method(index, error)
                continue
            wanted = method.hold_rate_at_step, method.fixed_target or None
            for field, value in zip(("holdRateAtStep", "fixedTarget"), wanted, strict=True):
                if value is not None and cell.algorithm.trust_region is None:
                    message = "is of a trust region; set learningRateRule: trustRegion"
                    conflicts.append(
                        conflict("methods", index, field, value=value, message=message)
                    )
        refuse(conflicts)
        return self

    def _unknown(self) -> Iterator[InitErrorDetails]:
        """Yield what names a method, a lag or a seed that its part does not have."""
        names = [method.name for method in self.methods]
        stale = [lag for lag in self.lags if lag > 0]
        rows: list[tuple[tuple[str | int, ...], Iterable[Any], Sequence[Any]]] = [
            (("subject",), (self.subject,), names),
            (("developmentSeeds",), self.development_seeds, self.all_seeds),
            *_named_by(self.more_seeds, "moreSeeds", lags=stale, methods=names),
        ]
        if (claims := self.claims) is not None:
            claimed, place = claims.methods or names, ("claims", "moreSeeds")
            rows += [
                (("claims", "methods"), claimed, names),
                (("subject",), (self.subject,), claimed),
                *_named_by(claims.more_seeds, *place, lags=claims.lags, methods=claimed),
            ]
        for location, given, known in rows:
            if unknown := [each for each in given if each not in known]:
                message = f"must be among {list(known)}; remove the others"
                yield conflict(*location, value=unknown, message=message)

    def _wrong_lags(self) -> Iterator[InitErrorDetails]:
        if self.tuning is None:
            if self.claims is not None:
                message = "needs rates that `tuning` finds; give `tuning` too, or remove it"
                yield conflict("claims", value="given", message=message)
            return
        claimed = self.claims.lags if self.claims else (0,)
        for location, lags in ((("lags",), self.lags), (("claims", "lags"), claimed)):
            if 0 not in lags:
                message = "must hold 0, the synchronous run with which others are compared; add it"
                yield conflict(*location, value=list(lags), message=message)

    def _shared_seeds(self) -> Iterator[InitErrorDetails]:
        message = "must not be seeds of `tuning` too; replace them in one of the two"
        parts: list[tuple[tuple[str, ...], _SeededPart]] = [((), self)]
        if self.claims is not None:
            parts.append((("claims",), self.claims))
        for place, part in parts:
            more = {
                ("moreSeeds", at, "seeds"): each.seeds for at, each in enumerate(part.more_seeds)
            }
            for location, seeds in ({("seeds",): part.seeds} | more).items():
                if shared := sorted(set(seeds) & set(self.tuning_seeds)):
                    yield conflict(*place, *location, value=shared, message=message)

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        return () if self.tuning is None else self.tuning.seeds

    def plane_has_seed(self, method: str, lag: int, seed: int) -> bool:
        """Return whether the plane has a seed for a method at a lag; at 0, one of the tuning."""
        if lag == 0 and self.tuning is not None:
            return seed in self.tuning.seeds
        return self.has_seed(method, lag, seed)

    def method(self, name: str) -> StudyMethod:
        """Return the method with a name; a KeyError says that no method has it."""
        return {method.name: method for method in self.methods}[name]


def _named_by(
    more: Iterable[MoreSeeds], *place: str, lags: Sequence[int], methods: Sequence[str]
) -> Iterator[tuple[tuple[str | int, ...], Iterable[Any], Sequence[Any]]]:
    """Yield the place of each field of more seeds, what it names and what its part has."""
    for index, each in enumerate(more):
        yield (*place, index, "lags"), each.lags or (), lags
        yield (*place, index, "methods"), each.methods or (), methods


def _problems_of_method(index: int, error: ValidationError) -> Iterator[InitErrorDetails]:
    """Yield the problems of a method's run as problems of the method."""
    inputs = {field_path(details["loc"]): details["input"] for details in error.errors()}
    for problem in problems_of(error):
        location = problem.path.split(".")
        value = inputs[problem.path]
        yield conflict("methods", index, *location, value=value, message=problem.message)


class VCPOStudy(Section):
    """A study as the user writes it."""

    api_version: Literal["vcpo.dev/v1alpha1"] = API_VERSION
    kind: Literal["VCPOStudy"]
    metadata: Metadata
    spec: StudySpec


def cell_spec(
    study: StudySpec, method: StudyMethod, *, lag: int, learning_rate: float, seed: int
) -> VCPORunSpec:
    """Return the run of one cell.

    Only fields that the file sets are merged. Other fields take the defaults of the merged run,
    because a method may have defaults of its own.

    Raises:
        ValidationError: when the method's fields do not fit; paths start at the run's spec.
    """
    document = study.run.model_dump(mode="json", by_alias=True, exclude_unset=True)
    algorithm = {**document.get("algorithm", {}), **method.algorithm, LAG_FIELD: lag}
    optimizer = {**document.get("optimizer", {}), **method.optimizer, RATE_FIELD: learning_rate}
    # A cell shows what a method does at a rate and a lag, so nothing but the method changes them.
    health = {"enabled": False}
    document |= {"algorithm": algorithm, "optimizer": optimizer, "health": health, "seed": seed}
    spec = VCPORunSpec.model_validate_json(json.dumps(document), strict=True)
    # Formats that a file does not set are a CPU's, so a cell is the same one on any device.
    return with_gpu_defaults(spec, GpuUse.of_machine(spec, has_gpus=False, has_vllm=False))


def load_study(path: Path) -> VCPOStudy:
    """Read and validate a study file.

    Raises:
        SpecError: with every problem of the file.
    """
    return load_document(path, VCPOStudy)


def model_directory(study: VCPOStudy, file: Path) -> str:
    """Return the base run's model: a directory beside the study's file, or a hub name.

    Raises:
        SpecError: when the model is missing or does not fit the study.
    """
    run = with_local_paths(VCPORun(metadata=study.metadata, spec=study.spec.run), file)
    problems = [
        replace(each, path=f"spec.run.{each.path.removeprefix('spec.')}")
        for each in model_problems(run)
    ]
    if problems:
        raise SpecError(str(file), problems)
    return run.spec.model.name
