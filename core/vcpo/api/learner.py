"""The section of a run that sets how and on what the learner trains."""

from enum import StrEnum
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from vcpo.api.cluster import DrainSeconds, Image, ObjectName, PodTemplate, StorageRetention
from vcpo.api.fields import Seconds, Section, conflict, refuse
from vcpo.api.workloads import Precision, Threads


class OptimizerName(StrEnum):
    """The optimizer."""

    ADAMW = "adamw"
    MUON = "muon"
    """Muon for matrices, AdamW for the rest."""


ALGORITHMS_OF_RANKS: Final = (OptimizerName.ADAMW,)
"""The algorithms whose step is the same at any number of ranks. `muon` multiplies sharded matrices
in bfloat16, so its step is not."""


class Schedule(StrEnum):
    """How the base learning rate changes after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


FINAL_LEARNING_RATE_RATIO: Final = 0.1
"""Base learning rate of the last step, as a share of `learningRate`, if the schedule lowers it."""

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class Optimizer(Section):
    """The optimizer, and the base learning rate that the learning-rate rule scales."""

    name: OptimizerName = OptimizerName.ADAMW
    """Optimizer: `adamw`, or `muon` (for the matrices of the decoder layers, with a momentum of
    0.95 and half of AdamW's memory; AdamW for the rest). Several ranks need `adamw`."""
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-6
    """Base learning rate, reached after the warm-up. The learning-rate rule scales it at each
    step. Lower it if the reward falls again; adapters take about ten times that of all
    parameters."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Updates over which the base learning rate rises linearly from zero. A skipped step is not an
    update."""
    schedule: Schedule = Schedule.CONSTANT
    """Course of the base learning rate from the warm-up to the last of `steps`: `constant`,
    `linear` or `cosine`; the last two go down to a tenth of `learningRate`. Skipped steps count.
    If `steps` is raised later, the run continues along the longer course."""
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Decoupled weight decay, of matrices only."""
    betas: Annotated[tuple[Decay, ...], Field(min_length=2, max_length=2)] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    epsilon: Annotated[float, Field(gt=0.0, le=1e-2)] = 1e-8
    """Term that AdamW adds to the square root of the second moment."""
    max_gradient_norm: Annotated[float, Field(gt=0.0, le=1e6)] = 1.0
    """Largest L2 norm of the whole gradient; a longer gradient is scaled down to it."""

    @property
    def checkpoint_bytes_per_parameter(self) -> int:
        return 12


class Attention(StrEnum):
    """How the learner computes attention."""

    AUTO = "auto"
    """`varlen` for packed rows, and for models whose scores have a soft cap, else `sdpa`."""
    SDPA = "sdpa"
    """PyTorch's own, for padded rows."""
    VARLEN = "varlen"
    """Within each trajectory, never with a mask."""


class ActivationCheckpointing(StrEnum):
    """Which activations the backward pass computes again instead of keeping them."""

    AUTO = "auto"
    """`none` where a GPU's memory holds many tokens so; on a CPU, up to 1 B parameters."""
    NONE = "none"
    LAYERS = "layers"
    """The activations within each decoder layer are computed again."""


class GradientMode(StrEnum):
    """How the learner gets from norms to the weighted gradient."""

    AUTO = "auto"
    """`onePass` where the method and the place of the ranks allow it, else `twoPass`."""
    ONE_PASS = "onePass"  # noqa: S105 - not a password
    """Norms and sums from one backward pass."""
    TWO_PASS = "twoPass"  # noqa: S105 - not a password
    """A backward pass for the norms, and another one for the sum."""


class Learner(Section):
    """The processes that train."""

    precision: Precision | None = None
    """Number format of the forward and backward pass; parameters and optimizer state are always
    float32. If unset, `bfloat16` on a GPU, else `float32`."""
    attention: Attention = Attention.AUTO
    """How attention is computed: `sdpa` (PyTorch's own, for padded rows), `varlen` (within each
    trajectory, no mask), or `auto` (`varlen` for packed rows, for models with a soft cap on
    scores and in bfloat16 on a CPU, else `sdpa`)."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.AUTO
    """Activations of the decoder layers: the backward pass computes them again (`layers`), or they
    are kept (`none`). `layers` costs about a third more time and takes a fraction of the memory.
    `auto` keeps them where a GPU's memory then holds 8,192 tokens and the longest trajectory; on a
    CPU, for models of less than 1 B parameters."""
    gradient_mode: GradientMode = GradientMode.AUTO
    """Backward passes of a step whose baseline needs gradient norms: `onePass` (norms and sums
    together), `twoPass` (first the norms, then the sum), or `auto` (`onePass` where the method
    allows it; but `twoPass` for exact norms if a copy of the parameters spans pods, because the
    sums of one pass take longer between machines than a second pass). It does not change the
    update."""
    processes: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of processes (ranks) that share the model on one machine: in a local run, or in each
    pod. If unset, `gpusPerReplica`, or 1."""
    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Pods that train together, in a cluster. More than one needs a volume that all of them can
    write."""
    gpus_per_replica: Annotated[int, Field(ge=1, le=64)] | None = None
    """GPUs of each of the learner's pods, one for each process. If unset, what `template` asks
    for."""
    fsdp_size: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Ranks that hold one copy of the parameters together (FSDP). Fewer than all ranks make several
    copies (HSDP), which saves communication between machines. It must divide the number of ranks.
    If unset, all ranks."""
    collective_timeout_seconds: Seconds = 600
    """Longest time, in seconds, that a rank waits for the others; then the ranks restart from the
    last checkpoint."""
    max_mismatch_nats: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    """Largest mean difference of rollout and learner log-probabilities at lag 0, in nats per token.
    A larger one at the first comparison ends the run; later it is reported (event
    `EnginesDisagree`). If unset, 0.002 where all compute in float32, 0.075 with bfloat16, and 0.3
    with `quantization` or `noise`."""
    threads: Threads | None = None
    """CPU threads of the tensor library. If unset, the library chooses."""
    checkpoint_storage_gibibytes: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Size of the volume for checkpoints, the redo log and the final model, in GiB, in a cluster.
    It can grow, never shrink. If unset, it is computed from `model.sizeBillions`, and is at least
    50. Each checkpoint that is kept takes about 12 GiB for every billion of trained parameters."""
    checkpoint_storage_class_name: ObjectName | None = None
    """Storage class of the volume for checkpoints. If unset, the cluster's default. Immutable."""
    checkpoint_storage_retention: StorageRetention = StorageRetention.RETAIN
    """Fate of the volume for checkpoints, and with it of the trained model, when the run is
    deleted: `Retain` keeps it, `Delete` deletes it."""
    image: Image | None = None
    """Container image of the learner in a cluster. If unset, the operator's default."""
    drain_seconds: DrainSeconds = 120
    """Longest time, in seconds, that a stopping learner may take to finish its step and write a
    checkpoint: in a cluster, and after Ctrl-C in `vcpo run`. Raise it if steps or checkpoints take
    long."""
    template: PodTemplate = Field(default={})
    """Part of a PodTemplateSpec, merged into the learner's pod in a cluster; the container's name
    is `learner`. Use it for resources, node selection and volumes."""

    @property
    def number_format(self) -> Precision:
        return self.precision or Precision.FLOAT32

    @property
    def ranks_per_replica(self) -> int:
        return self.processes or self.gpus_per_replica or 1

    @property
    def ranks(self) -> int:
        return self.replicas * self.ranks_per_replica

    def prefers_one_pass(self, *, sums_groups: bool) -> bool:
        """Return whether norms and gradient come from one pass, if the method allows it.

        sums_groups: whether the sum of each group leaves a rank in that pass, as with exact norms.
            In two passes one sum leaves it in all, which takes less time between machines.
        """
        if self.gradient_mode is not GradientMode.AUTO:
            return self.gradient_mode is GradientMode.ONE_PASS
        is_in_one_pod = (self.fsdp_size or self.ranks) <= self.ranks_per_replica
        return is_in_one_pod or not sums_groups

    @model_validator(mode="after")
    def _processes_have_gpus(self) -> Self:
        given, gpus = self.processes, self.gpus_per_replica
        if given is not None and gpus is not None and given != gpus:
            message = f"must be `gpusPerReplica` ({gpus}), one process for each GPU; remove it"
            refuse([conflict("processes", value=given, message=message)])
        return self
