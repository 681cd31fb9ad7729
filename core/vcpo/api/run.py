"""The whole run: `apiVersion`, `kind`, `metadata`, `spec`."""

import math
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import InitErrorDetails

from vcpo.algo.advantage import BaselineScope
from vcpo.algo.baseline import Baseline
from vcpo.algo.health.collapse import REWARD_WINDOW_STEPS
from vcpo.algo.health.mismatch_review import MISMATCH_LIMITS_NATS, MismatchClass
from vcpo.api.algorithm import Algorithm, Batch, Evaluation, Sampling
from vcpo.api.cluster import Pods, UpgradePolicy
from vcpo.api.fields import DnsLabel, DnsSubdomain, Seconds, Section, Steps, conflict, refuse
from vcpo.api.learner import ALGORITHMS_OF_RANKS, GradientMode, Learner, Optimizer, Schedule
from vcpo.api.tracking import Tracking
from vcpo.api.workloads import (
    Checkpoint,
    Control,
    EngineName,
    Environment,
    FailurePolicy,
    Health,
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
"""Folder of a local run's file; the user's own environments are imported from there first."""

START_DATE_ANNOTATION: Final = "vcpo.dev/start-date"
"""Day on which the run began, as YYYY-MM-DD in UTC; the host sets it. A chat template that writes
today's date writes this one on every day, so that a prompt keeps its tokens."""

BASELINES_OF_PAIRS: Final = (
    Baseline.OPOB,
    Baseline.PESSIMISTIC,
    Baseline.GROUP_MEAN,
    Baseline.RLOO,
    Baseline.GRPO,
)
"""Baselines that compare trajectories, of one prompt or of the batch; they need at least two."""

_CHECKPOINT_STORAGE_GIBIBYTES: Final = 50
"""Size of the volume where the model's size is not known, and the least one."""

MAX_VLLM_TEMPERATURE: Final = 2.0
"""Highest temperature that `vllm.SamplingParams` takes (vLLM 0.32); it refuses a request above."""

MAX_GROUPS: Final = 8
"""Most rollout groups of a run."""

_Labels = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=64)]
_Annotations = Annotated[dict[str, Annotated[str, Field(max_length=65_536)]], Field(max_length=64)]


class Metadata(Section):
    """The run's identity."""

    name: Annotated[DnsSubdomain, Field(min_length=1, max_length=40)]
    """Name of the run, unique in its namespace; at most 40 characters, because names of pods and
    Services are built from it."""
    namespace: DnsLabel | None = None
    """Namespace in a cluster. A local run ignores it."""
    labels: _Labels = Field(default={})
    """Kubernetes labels."""
    annotations: _Annotations = Field(default={})
    """Kubernetes annotations."""

    @model_validator(mode="after")
    def _start_is_a_day(self) -> Self:
        given = self.annotations.get(START_DATE_ANNOTATION)
        if given is not None:
            try:
                date.fromisoformat(given)
            except ValueError:
                message = "must be a day, as YYYY-MM-DD; or leave it to the host"
                problem = conflict(
                    "annotations", START_DATE_ANNOTATION, value=given, message=message
                )
                refuse([problem])
        return self


class VCPORunSpec(Section):
    """The run; only `model`, `environment` and `steps` are required."""

    model: Model
    environment: Environment
    steps: Steps
    """Optimizer steps of the run. Raise it before the run is complete to train longer; in a cluster
    the learner takes the old number first, unless the schedule or noise depends on the number."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of prompts, sampling and initialization. Asynchronous timing still varies from run to
    run."""
    algorithm: Algorithm = Algorithm()
    batch: Batch = Batch()
    sampling: Sampling = Sampling()
    optimizer: Optimizer = Optimizer()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    lease: Lease = Lease()
    weights: Weights = Weights()
    control: Control = Control()
    health: Health = Health()
    learner: Learner = Learner()
    rollouts: Annotated[
        tuple[RolloutGroup, ...],
        Field(
            min_length=1, max_length=MAX_GROUPS, json_schema_extra={"x-kubernetes-list-type": "map"}
        ),
    ] = (RolloutGroup(name="main"),)
    """Groups of rollout workers, each with a unique name."""

    tracking: Tracking = Tracking()
    pods: Pods = Pods()
    suspend: bool = False
    """If true, the run's pods are stopped. The run's record and volume stay; set it to false to
    resume from the last checkpoint."""
    upgrade_policy: UpgradePolicy = UpgradePolicy.ON_RESTART
    """When the pods become those of an upgraded operator or of its changed settings, in a cluster:
    `OnRestart` (when the learner's pods start again for another reason), `Recreate` (at once, from
    the last checkpoint), or `Never`. An edit of the run takes the newest."""
    pending_deadline_seconds: Seconds | None = None
    """Longest time that the run's pods may wait for a node (in a queue, for a quota, for machines),
    in seconds, in a cluster; then the run fails. If unset, no limit."""
    active_deadline_seconds: Seconds | None = None
    """Longest time of the run, in seconds; then it fails. In a cluster the time counts from when
    the learner and a worker have a node, so time in a queue does not count. If unset, no limit."""
    startup_deadline_seconds: Seconds = 1800
    """Longest time until the first optimizer step, in seconds; then the run fails. It counts from
    the same moment as `activeDeadlineSeconds`. Raise it if images or models take long to load."""
    ttl_seconds_after_finished: Seconds | None = None
    """Time after which an ended run is deleted from the cluster, in seconds. If unset, the run
    stays."""
    failure_policy: FailurePolicy = FailurePolicy()

    @property
    def mismatch_class(self) -> MismatchClass:
        """Number formats of rollout groups and learner, the widest apart of all."""
        groups = self.rollouts
        if any(each.quantization is not Quantization.NONE or each.noise for each in groups):
            return MismatchClass.QUANTIZED_OR_NOISY
        if Precision.BFLOAT16 in {
            self.learner.number_format,
            *(each.number_format for each in groups),
        }:
            return MismatchClass.ROUNDED
        return MismatchClass.EXACT

    @property
    def mismatch_limit_nats(self) -> float:
        return self.learner.max_mismatch_nats or MISMATCH_LIMITS_NATS[self.mismatch_class]

    @property
    def rollback_age_steps(self) -> int:
        """Steps that a checkpoint must be older than the step that causes a rollback to it.

        A collapse shows in a mean over some steps, and their responses are of older versions still.
        What is younger may hold its beginning.
        """
        return REWARD_WINDOW_STEPS + self.algorithm.max_policy_lag_steps

    @property
    def context_tokens(self) -> int | None:
        """Longest prompt and response together of any rollout group; None for the model's."""
        lengths = [group.max_model_len for group in self.rollouts]
        given = [length for length in lengths if length is not None]
        return max(given) if len(given) == len(lengths) else None

    @property
    def published_precision(self) -> Precision:
        """The smallest number format of versions that changes nothing of what workers compute.

        A bfloat16 worker rounds float32 weights when it loads them. If the learner rounds them, the
        worker gets the same values in half the bytes. Adapters are published in float32, because a
        worker multiplies them before it rounds.
        """
        wide = any(group.number_format is Precision.FLOAT32 for group in self.rollouts)
        return Precision.FLOAT32 if wide or self.model.lora is not None else Precision.BFLOAT16

    @property
    def workers_at_start(self) -> int:
        return sum(group.min_replicas for group in self.rollouts)

    @property
    def most_checkpoints(self) -> int:
        """Checkpoints on the disk at once: the kept ones, the best, and the one being written."""
        kept, guards = self.checkpoint.keep, self.health.guards
        if guards.rolls_back:
            is_next_aged = self.rollback_age_steps <= self.checkpoint.every_steps
            kept = max(kept, 2 if is_next_aged else 3)
        return kept + 2

    @property
    def checkpoint_storage_gibibytes(self) -> int:
        """Size of the volume for checkpoints in GiB: as set, or for model and log; at least 50.

        There is room for the checkpoints that are kept, the one that is being written, the final
        model in float32, and the redo log, which has a part of 1 GiB for each checkpoint.
        """
        if self.learner.checkpoint_storage_gibibytes is not None:
            return self.learner.checkpoint_storage_gibibytes
        checkpoint_bytes = self.optimizer.checkpoint_bytes_per_parameter
        bytes_per_parameter = self.most_checkpoints * checkpoint_bytes + 4
        model_bytes = (self.model.size_billions or 0.0) * 1e9 * bytes_per_parameter
        needed_bytes = model_bytes + self.most_checkpoints * 2**30
        return max(_CHECKPOINT_STORAGE_GIBIBYTES, math.ceil(needed_bytes / 2**30))

    @property
    def environment_timeout_s(self) -> float:
        return self.lease.timeout_seconds / 2

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        refuse(
            [
                *self._batch_conflicts(),
                *self._schedule_conflicts(),
                *self._group_conflicts(),
                *self._temperature_conflicts(),
                *self._rank_conflicts(),
                *self._gradient_conflicts(),
            ]
        )
        return self

    def _batch_conflicts(self) -> Iterator[InitErrorDetails]:
        size, algorithm = self.batch.trajectories_per_prompt, self.algorithm
        config = algorithm.loss_config
        is_of_batch = config.baseline_scope is BaselineScope.BATCH
        num_compared = self.batch.trajectories if is_of_batch else size
        if num_compared < 2 and config.baseline in BASELINES_OF_PAIRS:
            message = f"must be at least 2 for the baseline '{config.baseline}'"
            yield conflict("batch", "trajectoriesPerPrompt", value=size, message=message)
        probability = algorithm.on_policy_probability
        if probability is not None and self.batch.prompt_pool is None:
            location = ("algorithm", "onPolicyProbability")
            message = "stored responses need prompts that repeat; give `batch.promptPool`"
            yield conflict(*location, value=probability, message=message)

    def _schedule_conflicts(self) -> Iterator[InitErrorDetails]:
        warmup, schedule = self.optimizer.warmup_steps, self.optimizer.schedule
        if schedule is not Schedule.CONSTANT and warmup >= self.steps:
            message = f"must be less than `steps` ({self.steps}) for the schedule '{schedule}'"
            yield conflict("optimizer", "warmupSteps", value=warmup, message=message)

    def _group_conflicts(self) -> Iterator[InitErrorDetails]:
        size = self.batch.trajectories_per_prompt
        names = [group.name for group in self.rollouts]
        for index, group in enumerate(self.rollouts):
            if group.name in names[:index]:
                message = "another group has this name; give each group its own"
                yield conflict("rollouts", index, "name", value=group.name, message=message)
            places = group.max_concurrent_sequences
            if places < size:
                location = ("rollouts", index, "maxConcurrentSequences")
                message = f"must be at least `batch.trajectoriesPerPrompt` ({size})"
                yield conflict(*location, value=places, message=message)
            most, longest = self.sampling.max_new_tokens, group.max_model_len
            if longest is not None and longest <= most:
                location = ("rollouts", index, "maxModelLen")
                message = f"must be more than `sampling.maxNewTokens` ({most}): prompts need room"
                yield conflict(*location, value=longest, message=message)

    def _temperature_conflicts(self) -> Iterator[InitErrorDetails]:
        groups = [group for group in self.rollouts if group.engine_name == EngineName.VLLM]
        for section, given in (("sampling", self.sampling), ("evaluation", self.evaluation)):
            temperature = given.temperature
            if groups and temperature > MAX_VLLM_TEMPERATURE:
                name = groups[0].name
                message = (
                    f"must be at most {MAX_VLLM_TEMPERATURE} for engine 'vllm',"
                    f" which rollout group '{name}' uses"
                )
                yield conflict(section, "temperature", value=temperature, message=message)

    def _rank_conflicts(self) -> Iterator[InitErrorDetails]:
        size, ranks = self.learner.fsdp_size, self.learner.ranks
        if size is not None and ranks % size:
            message = f"must divide the number of ranks ({ranks})"
            yield conflict("learner", "fsdpSize", value=size, message=message)
        name = self.optimizer.name
        if ranks > 1 and name not in ALGORITHMS_OF_RANKS:
            message = f"must be '{ALGORITHMS_OF_RANKS[0]}' for several ranks ({ranks})"
            yield conflict("optimizer", "name", value=name.value, message=message)

    def _gradient_conflicts(self) -> Iterator[InitErrorDetails]:
        mode = self.learner.gradient_mode
        if mode is GradientMode.ONE_PASS and not self.algorithm.fits_one_pass:
            message = "the method or its baseline needs two passes; use 'auto'"
            yield conflict("learner", "gradientMode", value=mode.value, message=message)


class VCPORun(Section):
    """One training run: model, environment, algorithm and workers."""

    api_version: Literal["vcpo.dev/v1alpha1"] = API_VERSION
    """Version of this format."""
    kind: Literal["VCPORun"] = KIND
    """Kind of the document."""
    metadata: Metadata
    spec: VCPORunSpec

    @property
    def start_date(self) -> date | None:
        given = self.metadata.annotations.get(START_DATE_ANNOTATION)
        return None if given is None else date.fromisoformat(given)

    def begun_on(self, day: date) -> Self:
        """Return the run with the day on which it began, unless it has one."""
        annotations = {START_DATE_ANNOTATION: day.isoformat(), **self.metadata.annotations}
        metadata = self.metadata.model_copy(update={"annotations": annotations})
        return self.model_copy(update={"metadata": metadata})


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a run file, with defaults and descriptions."""
    return VCPORun.model_json_schema(by_alias=True)


_KEPT: Final = {"model", "environment", "batch", "optimizer"}
_ABSENT: Final = object()


def continuation_document(run: VCPORun) -> dict[str, Any]:
    """Return the parts of a spec on which a checkpoint's contents depend, as JSON.

    Steps, deadlines, workers, control and the choice of prompts are not among them.
    """
    document = run.spec.model_dump(mode="json", by_alias=True, include=_KEPT)
    document["environment"].pop("maxAbsoluteReward")  # a bound, not content
    document["model"].pop("sizeBillions")  # a hint for the volume
    # Memory layout and sampling order do not change what was learned.
    for field in (
        "microBatchTrajectories",
        "tokensPerMicroBatch",
        "overProvisionRatio",
        "promptPool",
        "promptSelection",
    ):
        document["batch"].pop(field)
    return document


def continuation_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str = "spec"
) -> Iterator[str]:
    """Yield each field that differs between two continuation documents, with both values."""
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name, _ABSENT), after.get(name, _ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from continuation_changes(old, new, f"{path}.{name}")
        elif old != new:
            yield f"{path}.{name}: {_format_value(old)} -> {_format_value(new)}"


def _format_value(value: object) -> str:
    return "nothing" if value is None or value is _ABSENT else repr(value)
