"""What runs where: model, environment, learner, rollout groups, leases, checkpoints, limits."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_core import InitErrorDetails

from vcpo.spec.cluster import (
    DrainSeconds,
    Image,
    ObjectName,
    PodTemplate,
    Scaling,
    StorageRetention,
)
from vcpo.spec.environments import environment_complaints
from vcpo.spec.fields import DnsLabel, Ratio, Seconds, Section, Steps, Text, conflict, refuse

Threads = Annotated[int, Field(ge=1, le=256)]
TargetModule = Annotated[str, Field(min_length=1, max_length=128)]


class Precision(StrEnum):
    """Number format of a forward pass; parameters and optimizer state are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Quantization(StrEnum):
    """What a sampler's matrices are rounded to."""

    NONE = "none"
    FP8 = "fp8"
    """E4M3, one scale per block of 128 x 128."""
    INT8 = "int8"
    """One scale per row."""


class PromptFormat(StrEnum):
    """How a prompt's text becomes tokens."""

    AUTO = "auto"
    """The tokenizer's chat template when it has one, else plain."""
    PLAIN = "plain"
    CHAT = "chat"


class EngineName(StrEnum):
    """What generates in a rollout worker."""

    HF = "hf"
    """`transformers`, in the worker's process, on any machine."""
    VLLM = "vllm"
    """vLLM, in processes of its own."""


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685): trained and published in place of all parameters."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of what is added to each matrix."""
    alpha: Annotated[int, Field(ge=1, le=10_000)] = 32
    """The adapters' product counts alpha / rank times."""
    target_modules: Annotated[list[TargetModule], Field(max_length=32)] = Field(default=[])
    """Last parts of the names of layers that get an adapter, such as `q_proj`; none names every
    linear layer but the output head."""

    @property
    def scale(self) -> float:
        """How many times the adapters' product counts."""
        return self.alpha / self.rank


class Model(Section):
    """The policy to train."""

    name: Annotated[Text, Field(min_length=1, max_length=512)]
    """A directory (relative to the run file) or a model name on the Hugging Face hub."""
    revision: Annotated[Text, Field(min_length=1, max_length=128)] | None = None
    """Branch, tag or commit on the hub; None is the default branch."""
    lora: Lora | None = None
    """Train adapters beside frozen parameters; None trains all parameters."""


class Environment(Section):
    """Task and reward."""

    name: Annotated[Text, Field(min_length=1, max_length=256)]
    """A task by its short name, as `countdown`, or `package.module:Class` for your own."""
    parameters: Annotated[dict[str, Any], Field(max_length=64)] = Field(default={})
    """Settings of the environment; its documentation lists them."""
    prompt_format: PromptFormat = PromptFormat.AUTO
    """How a prompt's text becomes tokens."""
    system_prompt: Annotated[str, Field(min_length=1, max_length=16_384)] | None = None
    """System message before each prompt that has none of its own; it needs the chat format."""
    call_timeout_seconds: Seconds | None = None
    """A prompt fails when one call of the environment's code for it takes longer than this; None is
    half of `lease.timeoutSeconds`."""
    max_absolute_reward: Annotated[float, Field(gt=0.0, le=1e9)] = 10_000.0
    """Largest absolute value of a reward. The learner refuses an answer with a larger one, which
    would outweigh all others of its step, and the generation counts as failed."""

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        refuse(
            conflict(*place, value=value, message=message)
            for place, value, message in environment_complaints(self.name, self.parameters)
        )
        return self

    @model_validator(mode="after")
    def _system_prompt_is_shown(self) -> Self:
        if self.system_prompt is not None and self.prompt_format is PromptFormat.PLAIN:
            message = "needs a `promptFormat` of 'chat' or 'auto', not 'plain'"
            refuse([conflict("systemPrompt", value=self.system_prompt, message=message)])
        return self


class Learner(Section):
    """The process that trains."""

    precision: Precision = Precision.FLOAT32
    """Number format of the forward and backward pass."""
    max_mismatch_nats: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    """Largest mean gap per token between the log-probabilities of sampler and learner at lag 0, at
    the start, above which the run fails; None is what the number formats explain."""
    threads: Threads | None = None
    """CPU threads for the tensor library; None lets it choose."""
    checkpoint_storage_gibibytes: Annotated[int, Field(ge=1, le=65_536)] = 50
    """Size of the volume for checkpoints and the final model, in a cluster; it never shrinks."""
    checkpoint_storage_class_name: ObjectName | None = None
    """Storage class of that volume; None is the cluster's default. Immutable."""
    checkpoint_storage_retention: StorageRetention = StorageRetention.RETAIN
    """Whether that volume, and with it the trained model, goes when the run is deleted."""
    image: Image | None = None
    """Container image in a cluster; None is the operator's default."""
    drain_seconds: DrainSeconds = 120
    """Time for a last checkpoint when the learner is asked to leave, in a cluster."""
    template: PodTemplate = Field(default={})
    """Merged into the pod template in a cluster; the container's name is `learner`."""


class RolloutNoise(Section):
    """Noise on the sampler's normalization weights, for exploration (QeRL, arXiv 2510.11696)."""

    initial_sigma: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-2
    """Standard deviation in the second stage; the first has none."""
    final_sigma: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-4
    """Standard deviation in the last stage; between them it falls geometrically."""
    stages: Annotated[int, Field(ge=3, le=1000)] = 10
    """Equal parts that the run is cut into."""


class RolloutGroup(Section):
    """Rollout workers of one kind."""

    name: Annotated[DnsLabel, Field(max_length=20)]
    """Unique in the run; part of the workers' names."""
    engine: EngineName = EngineName.HF
    """What generates: `hf` runs on any machine, `vllm` many sequences at a time on a GPU."""
    kv_cache_gibibytes: Annotated[float, Field(ge=1 / 16, le=4096.0)] | None = None
    """Room that `vllm` takes for keys and values; None is most of a GPU, or 1 GiB on a CPU."""
    min_replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """Workers kept even when the learner has more data than it can use."""
    max_replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Workers started at most while the learner starves."""
    max_concurrent_sequences: Annotated[int, Field(ge=1, le=4096)] = 64
    """Sequences one worker generates at a time."""
    precision: Precision = Precision.FLOAT32
    """Number format of generation; another than the learner's lowers the on-policy ESS ratio."""
    quantization: Quantization = Quantization.NONE
    """What the sampler's matrices are rounded to; the on-policy ESS ratio falls by what that costs,
    and is measured with it."""
    noise: RolloutNoise | None = None
    """Noise that the sampler's weights carry; None is none."""
    threads: Threads | None = None
    """CPU threads for the tensor library; None lets it choose."""
    scaling: Scaling = Scaling.DIRECT
    """Who sets the number of workers in a cluster."""
    image: Image | None = None
    """Container image in a cluster; None is the operator's default."""
    drain_seconds: DrainSeconds = 60
    """Time to finish answers when a worker is asked to leave, in a cluster; what is not finished
    by then goes back to the learner."""
    template: PodTemplate = Field(default={})
    """Merged into the pod template in a cluster; the container's name is `rollout`."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        refuse([*self._minimum_above_maximum(), *self._cache_without_engine()])
        return self

    def _minimum_above_maximum(self) -> Iterator[InitErrorDetails]:
        if self.min_replicas > self.max_replicas:
            message = f"may not be less than `minReplicas` ({self.min_replicas})"
            yield conflict("maxReplicas", value=self.max_replicas, message=message)

    def _cache_without_engine(self) -> Iterator[InitErrorDetails]:
        if self.kv_cache_gibibytes is not None and self.engine is not EngineName.VLLM:
            message = f"engine '{self.engine}' has no such cache; remove it, or use engine 'vllm'"
            yield conflict("kvCacheGibibytes", value=self.kv_cache_gibibytes, message=message)


class Lease(Section):
    """Terms on which workers get prompts."""

    timeout_seconds: Seconds = 600
    """A prompt not answered within this time is granted to somebody else."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Failed generations after which a prompt is given up."""


class Checkpoint(Section):
    """When the run's state is written, so that a restart loses at most this much."""

    every_steps: Steps = 50
    """Optimizer steps between checkpoints; there is always one at the end."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Newest checkpoints kept on disk."""
    full_disk_wait_seconds: Annotated[int, Field(ge=0, le=604_800)] = 600
    """When the disk is full at the end of a run, the learner waits this long for room for the last
    checkpoint and the model, then fails. Before the end, training goes on and saving is tried
    again."""


class Weights(Section):
    """How versions of the policy reach rollout workers."""

    archive_url: (
        Annotated[str, Field(max_length=1024, pattern=r"^(/|[a-z][a-z0-9+]*://).+$")] | None
    ) = None
    """Folder that the learner writes versions to and joining workers read: an absolute path that
    all of them mount, or a URL that fsspec knows, as `s3://bucket/folder`; None is no archive."""
    archive_anchor_every_steps: Annotated[int, Field(ge=1, le=10_000)] = 20
    """Versions from one full set in the archive to the next; deltas lie between."""


class Control(Section):
    """How the run is steered: admission of work and number of workers."""

    ess_floor_ratio: Ratio = 0.1
    """Below this share of the on-policy ESS ratio, the lag limit is halved at once, and again after
    every ten steps that stay below; healthy steps raise it slowly."""
    poll_seconds: Annotated[float, Field(ge=0.1, le=300.0)] = 2.0
    """Seconds between decisions."""
    signals_max_age_seconds: Seconds = 60
    """Signals older than this hold everything as it is."""
    idle_high_ratio: Ratio = 0.3
    """The learner starves when it waits for data more than this share of the time."""
    idle_low_ratio: Ratio = 0.02
    """The learner is saturated when it waits less than this share of the time."""
    scale_up_cooldown_seconds: Seconds = 30
    """Least time between two additions of workers."""
    scale_down_cooldown_seconds: Seconds = 300
    """Least time between two removals of workers."""

    @model_validator(mode="after")
    def _idle_band_is_open(self) -> Self:
        if self.idle_low_ratio >= self.idle_high_ratio:
            message = f"must be less than `idleHighRatio` ({self.idle_high_ratio})"
            refuse([conflict("idleLowRatio", value=self.idle_low_ratio, message=message)])
        return self


class Cleanup(StrEnum):
    """What happens to the workloads of a run that has ended, in a cluster."""

    DELETE_WORKLOADS = "DeleteWorkloads"
    """Learner and workers go, and with them their GPUs; the volume stays."""
    DELETE_ROLLOUTS = "DeleteRollouts"
    """Workers go; the learner's pod stays, with its GPU."""
    RETAIN_WORKLOADS = "RetainWorkloads"
    """All pods stay, with their GPUs, and crashed containers restart."""


class CleanupPolicy(Section):
    """What is removed when a run ends, in a cluster."""

    on_complete: Cleanup = Cleanup.DELETE_WORKLOADS
    """After success."""
    on_failed: Cleanup = Cleanup.DELETE_WORKLOADS
    """After failure; why it failed and the learner's last lines stay in the status."""


class FailurePolicy(Section):
    """How much may break before the run is called failed."""

    max_learner_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts of the learner in a row without progress, after which the run fails; progress is a
    step beyond the furthest one before. Workers of a cluster restart without a limit."""
    max_failures_in_a_row: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    """The run fails after this many failed generations in a row, as when the environment always
    raises. Raise it when prompts often fail for a good reason."""
    failure_tolerance_seconds: Seconds = 600
    """A run that had answers before fails only when failures in a row last this long, so that a
    reward server may restart meanwhile."""
