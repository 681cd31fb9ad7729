"""The whole run: `apiVersion`, `kind`, `metadata`, `spec`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import InitErrorDetails

from vcpo.algo import MISMATCH_LIMITS_NATS, Baseline, MismatchClass
from vcpo.spec.algorithm import Algorithm, Batch, Evaluation, Optimizer, Sampling
from vcpo.spec.cluster import Pods
from vcpo.spec.fields import DnsLabel, DnsSubdomain, Seconds, Section, Steps, conflict, refuse
from vcpo.spec.workloads import (
    Checkpoint,
    CleanupPolicy,
    Control,
    Environment,
    FailurePolicy,
    Learner,
    Lease,
    Model,
    Precision,
    Quantization,
    RolloutGroup,
    Weights,
)

API_VERSION: Final = "vcpo.dev/v1alpha1"
KIND: Final = "VCPORun"

RUN_FOLDER_ANNOTATION: Final = "vcpo.dev/run-folder"
"""Where a local run's file lay: environments of the user's own are imported from there first."""

BASELINES_OF_PAIRS: Final = (
    Baseline.OPOB,
    Baseline.PUBLISHED,
    Baseline.GROUP_MEAN,
    Baseline.RLOO,
    Baseline.GRPO,
)
"""Baselines that compare trajectories of one prompt, and so need at least two of them."""

_Labels = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=64)]
_Annotations = Annotated[dict[str, Annotated[str, Field(max_length=65_536)]], Field(max_length=64)]


class Metadata(Section):
    """The run's identity."""

    name: Annotated[DnsSubdomain, Field(min_length=1, max_length=40)]
    """Unique in its namespace; at most 40 characters, since names of pods and Services are built
    from it."""
    namespace: DnsLabel | None = None
    """Namespace in a cluster; a local run ignores it."""
    labels: _Labels = Field(default={})
    """Kubernetes labels."""
    annotations: _Annotations = Field(default={})
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
    weights: Weights = Weights()
    control: Control = Control()
    learner: Learner = Learner()
    rollouts: Annotated[
        tuple[RolloutGroup, ...],
        Field(min_length=1, max_length=8, json_schema_extra={"x-kubernetes-list-type": "map"}),
    ] = (RolloutGroup(name="main"),)
    """Groups of rollout workers, by unique name."""

    pods: Pods = Pods()
    managed_by: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Who looks after the run in a cluster; None or `vcpo.dev/operator` is our operator, which
    ignores a run with another value. Immutable."""
    suspend: bool = False
    """Keep the run's record and stop its workloads."""
    pending_deadline_seconds: Seconds | None = None
    """In a cluster, the run fails when its pods wait longer than this for a node: in a queue, for a
    quota, or for machines. None waits without a limit."""
    active_deadline_seconds: Seconds | None = None
    """The run fails when it takes longer than this; None is no limit. In a cluster it counts from
    when the learner and a worker have a node: time in a queue does not count."""
    startup_deadline_seconds: Seconds = 1800
    """The run fails when its first step is not taken within this time; it counts from the same
    moment as `activeDeadlineSeconds`."""
    ttl_seconds_after_finished: Seconds | None = None
    """An ended run is deleted from the cluster after this time; None keeps it."""
    cleanup_policy: CleanupPolicy = CleanupPolicy()
    failure_policy: FailurePolicy = FailurePolicy()

    @property
    def mismatch_limit_nats(self) -> float:
        """Largest mean gap per token between sampler and learner at lag 0, given or by format."""
        if self.learner.max_mismatch_nats is not None:
            return self.learner.max_mismatch_nats
        groups = self.rollouts
        if any(each.quantization is not Quantization.NONE or each.noise for each in groups):
            return MISMATCH_LIMITS_NATS[MismatchClass.QUANTIZED_OR_NOISY]
        if Precision.BFLOAT16 in {self.learner.precision, *(each.precision for each in groups)}:
            return MISMATCH_LIMITS_NATS[MismatchClass.ROUNDED]
        return MISMATCH_LIMITS_NATS[MismatchClass.EXACT]

    @property
    def environment_timeout_s(self) -> float:
        """Longest time of one call of the environment, given or by the lease's."""
        return self.environment.call_timeout_seconds or self.lease.timeout_seconds / 2

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        refuse(
            [
                *self._repeated_names(),
                *self._lonely_trajectories(),
                *self._small_workers(),
                *self._replay_without_pool(),
            ]
        )
        return self

    def _repeated_names(self) -> Iterator[InitErrorDetails]:
        names = [group.name for group in self.rollouts]
        for index, name in enumerate(names):
            if name in names[:index]:
                message = "another group has this name; give each its own"
                yield conflict("rollouts", index, "name", value=name, message=message)

    def _lonely_trajectories(self) -> Iterator[InitErrorDetails]:
        size = self.batch.trajectories_per_prompt
        if size < 2 and self.algorithm.loss_config.baseline in BASELINES_OF_PAIRS:
            message = f"must be at least 2 for the baseline '{self.algorithm.loss_config.baseline}'"
            yield conflict("batch", "trajectoriesPerPrompt", value=size, message=message)

    def _replay_without_pool(self) -> Iterator[InitErrorDetails]:
        probability = self.algorithm.on_policy_probability
        if probability is not None and self.batch.prompt_pool is None:
            location = ("algorithm", "onPolicyProbability")
            message = "earlier answers need prompts that come again; give `batch.promptPool`"
            yield conflict(*location, value=probability, message=message)

    def _small_workers(self) -> Iterator[InitErrorDetails]:
        size = self.batch.trajectories_per_prompt
        for index, group in enumerate(self.rollouts):
            places = group.max_concurrent_sequences
            if places < size:
                location = ("rollouts", index, "maxConcurrentSequences")
                message = f"must be at least `batch.trajectoriesPerPrompt` ({size})"
                yield conflict(*location, value=places, message=message)


class VCPORun(Section):
    """A run as the user writes it, in a file or in a cluster."""

    api_version: Literal["vcpo.dev/v1alpha1"] = API_VERSION
    """Version of this format."""
    kind: Literal["VCPORun"] = KIND
    """What the document describes."""
    metadata: Metadata
    spec: VCPORunSpec


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a run file, with defaults, bounds and descriptions."""
    return VCPORun.model_json_schema(by_alias=True)
