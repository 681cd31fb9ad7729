"""The whole run: `apiVersion`, `kind`, `metadata`, `spec`."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from vcpo.algo import Baseline
from vcpo.spec.algorithm import Algorithm, Batch, Evaluation, Optimizer, Sampling
from vcpo.spec.fields import DnsLabel, Seconds, Section, Steps, conflict
from vcpo.spec.workloads import (
    Checkpoint,
    CleanupPolicy,
    Control,
    Environment,
    FailurePolicy,
    Learner,
    Lease,
    Model,
    RolloutGroup,
)

API_VERSION: Final = "vcpo.dev/v1alpha1"
KIND: Final = "VCPORun"

_NEEDS_PAIRS = {
    Baseline.OPOB,
    Baseline.PUBLISHED,
    Baseline.GROUP_MEAN,
    Baseline.RLOO,
    Baseline.GRPO,
}
_Labels = Annotated[dict[str, str], Field(max_length=64)]


class Metadata(Section):
    """The run's identity."""

    name: Annotated[DnsLabel, Field(min_length=1, max_length=40)]
    """Unique in its namespace; at most 40 characters, since names of pods are built from it."""
    namespace: DnsLabel | None = None
    """Namespace in a cluster; a local run ignores it."""
    labels: _Labels = {}
    """Kubernetes labels."""
    annotations: _Labels = {}
    """Kubernetes annotations."""


class VCPORunSpec(Section):
    """Everything about a run; only `model`, `environment` and `steps` have no default."""

    model: Model
    environment: Environment
    steps: Steps
    """Optimizer steps to take."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of prompts, sampling and initialization; asynchronous timing still varies."""
    algorithm: Algorithm = Algorithm()
    batch: Batch = Batch()
    sampling: Sampling = Sampling()
    optimizer: Optimizer = Optimizer()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    lease: Lease = Lease()
    control: Control = Control()
    learner: Learner = Learner()
    rollouts: Annotated[
        tuple[RolloutGroup, ...],
        Field(min_length=1, max_length=8, json_schema_extra={"x-kubernetes-list-type": "map"}),
    ] = (RolloutGroup(name="main"),)
    """Groups of rollout workers, by unique name."""

    suspend: bool = False
    """Keep the run's record and stop its workloads."""
    active_deadline_seconds: Seconds | None = None
    """The run fails when it takes longer than this; None is no limit."""
    startup_deadline_seconds: Seconds = 1800
    """The run fails when its first step takes longer than this to happen."""
    ttl_seconds_after_finished: Seconds | None = None
    """An ended run is deleted from the cluster after this time; None keeps it."""
    cleanup_policy: CleanupPolicy = CleanupPolicy()
    failure_policy: FailurePolicy = FailurePolicy()

    @model_validator(mode="after")
    def _rollout_names_are_unique(self) -> Self:
        names = [group.name for group in self.rollouts]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise conflict("rollouts", name, f"the name '{name}' stands twice")
        return self

    @model_validator(mode="after")
    def _groups_are_large_enough(self) -> Self:
        size = self.batch.trajectories_per_prompt
        if size < 2 and self.algorithm.baseline in _NEEDS_PAIRS:
            message = f"must be at least 2 for the baseline '{self.algorithm.baseline}'"
            raise conflict("batch.trajectoriesPerPrompt", size, message)
        return self

    @model_validator(mode="after")
    def _a_group_fits_a_worker(self) -> Self:
        size = self.batch.trajectories_per_prompt
        for index, group in enumerate(self.rollouts):
            if group.max_concurrent_sequences < size:
                field = f"rollouts[{index}].maxConcurrentSequences"
                message = f"must be at least `batch.trajectoriesPerPrompt` ({size})"
                raise conflict(field, group.max_concurrent_sequences, message)
        return self


class VCPORun(Section):
    """A run as the user writes it, in a file or in a cluster."""

    api_version: Literal["vcpo.dev/v1alpha1"] = API_VERSION
    kind: Literal["VCPORun"] = KIND
    metadata: Metadata
    spec: VCPORunSpec


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a run file, with defaults, bounds and descriptions."""
    return VCPORun.model_json_schema(by_alias=True)
