"""The study file: what all cells have in common, and how they differ.

A study is a base run (the `spec` of a run) and the three axes of a grid. The run of a cell is the
base run with a method's `algorithm` fields, one lag, one learning rate and one seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from vcpo.local.models import model_problems
from vcpo.local.preflight import with_local_paths
from vcpo.spec import (
    API_VERSION,
    FieldProblem,
    SpecError,
    VCPORun,
    VCPORunSpec,
    load_document,
)
from vcpo.spec.errors import field_path, problems_of
from vcpo.spec.fields import DnsLabel, Section, conflict, refuse
from vcpo.spec.run import Metadata
from vcpo.spec.workloads import CriticalResponse

KIND: Final = "VCPOStudy"
LAG_FIELD: Final = "maxPolicyLagSteps"

_Lag = Annotated[int, Field(ge=0, le=1024)]
_Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Rate = Annotated[float, Field(gt=0.0, le=1.0)]
_SET_BY_STUDY: Final = "is set by the study; remove it and use `lags`"


def _distinct(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(numbers)) < len(numbers):
        raise PydanticCustomError("conflict", "holds a number twice")
    return numbers


class StudyMethod(Section):
    """One method of the grid: a name, and the fields of `algorithm` that it sets."""

    name: DnsLabel
    """Name of the method, unique in the study; part of the names of the cells' files."""
    title: Annotated[str, Field(min_length=1, max_length=40)] | None = None
    """Name in tables and figures; None uses `name`."""
    algorithm: Annotated[dict[str, Any], Field(max_length=64)] = Field(default={})
    """Fields of a run's `algorithm`; they override those of `run`."""

    @field_validator("algorithm")
    @classmethod
    def _has_no_lag(cls, algorithm: dict[str, Any]) -> dict[str, Any]:
        if LAG_FIELD in algorithm:
            refuse([conflict(LAG_FIELD, value=algorithm[LAG_FIELD], message=_SET_BY_STUDY)])
        return algorithm

    @property
    def label(self) -> str:
        """Name in tables and figures."""
        return self.title or self.name


class Tuning(Section):
    """How each method gets its learning rate: the best of candidates that are equal for all.

    The best rate has the highest mean final accuracy over `seeds` at `lag`; of equals, it is the
    lower rate.
    """

    learning_rates: Annotated[tuple[_Rate, ...], Field(min_length=1, max_length=32)]
    """Candidates, the same for every method."""
    lag: _Lag
    """The lag at which they are compared, in policy versions."""
    seeds: Annotated[tuple[_Seed, ...], Field(min_length=1, max_length=64)]
    """Seeds that the grid does not use."""


class StudySpec(Section):
    """The grid, and what its cells have in common."""

    run: VCPORunSpec
    """The base run. Its `seed` draws the held-out prompts, which are equal for all cells."""
    methods: Annotated[tuple[StudyMethod, ...], Field(min_length=1, max_length=32)]
    lags: Annotated[tuple[_Lag, ...], Field(min_length=1, max_length=32), AfterValidator(_distinct)]
    """Age of every batch of a cell, in policy versions; the first batches are younger."""
    seeds: Annotated[
        tuple[_Seed, ...], Field(min_length=1, max_length=64), AfterValidator(_distinct)
    ]
    """Seeds of training prompts and sampling."""
    tuning: Tuning | None = None
    """None trains every cell at the base run's learning rate."""
    subject: DnsLabel
    """Name of the method that the headline numbers describe."""
    uncontrolled: DnsLabel | None = None
    """Name of the method with which `subject` is compared."""

    @field_validator("run")
    @classmethod
    def _cells_support_the_run(cls, run: VCPORunSpec) -> VCPORunSpec:
        conflicts = []
        if "max_policy_lag_steps" in run.algorithm.model_fields_set:
            lag = run.algorithm.max_policy_lag_steps
            conflicts.append(conflict("algorithm", LAG_FIELD, value=lag, message=_SET_BY_STUDY))
        if run.model.lora is not None:
            message = "a study trains all parameters; remove it"
            conflicts.append(conflict("model", "lora", value="given", message=message))
        if run.batch.prompt_pool is not None:
            message = "a study's prompts never come again; remove it"
            pool = run.batch.prompt_pool
            conflicts.append(conflict("batch", "promptPool", value=pool, message=message))
        refuse(conflicts)
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
        conflicts = []
        names = [method.name for method in self.methods]
        for role, named in (("subject", self.subject), ("uncontrolled", self.uncontrolled)):
            if named is not None and named not in names:
                message = f"must name one of the methods: {', '.join(names)}"
                conflicts.append(conflict(role, value=named, message=message))
        shared = set(self.seeds) & set(self.tuning.seeds if self.tuning else ())
        if shared:
            message = f"must not be seeds of `tuning` too; replace {sorted(shared)} in one of them"
            conflicts.append(conflict("seeds", value=list(self.seeds), message=message))
        for index, method in enumerate(self.methods):
            try:
                cell_spec(self, method, lag=self.lags[0], learning_rate=1e-6, seed=self.seeds[0])
            except ValidationError as error:
                conflicts += _problems_of_method(index, error)
        refuse(conflicts)
        return self

    def method(self, name: str) -> StudyMethod:
        """Return the method with a name.

        Raises:
            KeyError: when no method has it.
        """
        return {method.name: method for method in self.methods}[name]


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
    optimizer = {**document.get("optimizer", {}), "learningRate": learning_rate}
    # A cell shows what a method does at a rate and a lag, so nothing but the method changes them.
    control = {**document.get("control", {}), "onCritical": CriticalResponse.IGNORE}
    document |= {"algorithm": algorithm, "optimizer": optimizer, "control": control, "seed": seed}
    return VCPORunSpec.model_validate_json(json.dumps(document), strict=True)


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
        FieldProblem(
            path=f"spec.run.{problem.path.removeprefix('spec.')}",
            value=problem.value,
            message=problem.message,
        )
        for problem in model_problems(run)
    ]
    if problems:
        raise SpecError(str(file), problems)
    return run.spec.model.name
