"""Clusters of GPUs as systems: a model, workers, and a learner, with times by calculation.

Workers decode at the speed of their memory: every token of all responses reads the weights and the
keys and values of the responses once. The learner multiplies at a share of its GPUs' peak: 8
operations for each parameter and token, forward passes computed again. A version makes a worker
read all running responses again, prompts included, at the same share (`kvCache: recompute`). What
is not a GPU's has measured constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.harness.timed_engine import Lengths
from benchmarks.simulate import constants
from benchmarks.simulate.system import EventLoop, Generation, Step, System, Versions

OPERATIONS: Final = 8
"""For each parameter and token of a step: 2 forward, 4 backward, 2 to compute forward again."""
_FORWARD_OPERATIONS: Final = 2
_BFLOAT16_BYTES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A dense model, and the GPUs that each side uses for it."""

    name: str
    parameters: float
    layers: int
    hidden: int
    """Size of a layer's states."""
    token_bytes: int
    """Keys and values of one token of context."""
    worker_gpus: int
    """GPUs of one worker: tensor parallel."""
    learner_gpus: int

    @property
    def full_gigabytes(self) -> float:
        """Size of a published version, GB."""
        return self.parameters * _BFLOAT16_BYTES / 1e9


MODELS: Final = (
    Model(
        name="7B",
        parameters=7.6e9,
        layers=28,
        hidden=3584,
        token_bytes=57_344,
        worker_gpus=1,
        learner_gpus=8,
    ),
    Model(
        name="70B",
        parameters=70.6e9,
        layers=80,
        hidden=8192,
        token_bytes=327_680,
        worker_gpus=4,
        learner_gpus=64,
    ),
)
"""Shapes of Qwen2.5-7B (28 layers, 4 heads of keys of 128) and of Llama-3.1-70B (80 layers, 8)."""


LENGTHS: Final = Lengths(median=1024.0, sigma=1.0, most=8192)
"""A long tail: one of 20 responses has more than 5,300 tokens; the mean is 1,600."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is generated and trained on."""

    lengths: Lengths = LENGTHS
    """Of responses, tokens."""
    context_tokens: int = 2048
    """Mean tokens of a running response with its prompt."""
    running: int = 64
    """Responses that a worker decodes at a time; it has places for the rest of their groups too."""
    group_size: int = 8
    prompts_per_step: int = 256
    max_policy_lag_steps: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A model's run on some GPUs."""

    model: Model
    workers: int
    learner_gpus: int
    workload: Workload = Workload()
    by_shards: bool = False
    """Whether each rank publishes its part of a version and each GPU of a worker takes in its part;
    else one process of the learner gathers it, and one of the worker takes all of it in."""

    def system(self) -> System:
        """Return the sizes and times of the run."""
        workload, lengths = self.workload, self.workload.lengths
        longest = lengths.expected_longest(workload.group_size)
        groups = round(
            workload.running * longest / lengths.expected_longest(1) / workload.group_size
        )
        return System(
            workers=self.workers,
            generation=Generation(
                lengths=lengths,
                token_s=self.decoding_token_s(),
                places=groups * workload.group_size,
            ),
            prompts_per_step=workload.prompts_per_step,
            group_size=workload.group_size,
            max_policy_lag_steps=workload.max_policy_lag_steps,
            step=Step(
                token_s=self.learner_token_s(),
                host_token_s=constants.STEP_HOST_TOKEN_S.value,
            ),
            event_loop=EventLoop(
                group_s=constants.GROUP_S.value,
                token_s=constants.SUBMITTED_TOKEN_S.value,
                version_s=constants.VERSION_S.value,
                waiting_s=constants.WAITING_S.value,
            ),
            versions=self._versions(),
        )

    def decoding_token_s(self) -> float:
        """Return the seconds of a token of all running responses."""
        model, workload = self.model, self.workload
        contexts = workload.running * workload.context_tokens * model.token_bytes
        bandwidth = model.worker_gpus * constants.MEMORY_BYTES_PER_S.value
        return (model.full_gigabytes * 1e9 + contexts) / bandwidth

    def learner_token_s(self) -> float:
        """Return the seconds of the learner's GPUs for each token of a step."""
        flops = self.learner_gpus * constants.FLOPS.value
        return OPERATIONS * self.model.parameters / flops

    def rereading_s(self) -> float:
        """Return the seconds in which a worker reads all running responses again.

        A token meets each parameter once, and in each layer the keys and values of half of its
        context.
        """
        model, workload = self.model, self.workload
        attention = 2 * model.layers * model.hidden * workload.context_tokens / 2
        per_token = _FORWARD_OPERATIONS * (model.parameters + attention)
        flops = model.worker_gpus * constants.FLOPS.value
        return workload.running * workload.context_tokens * per_token / flops

    def _versions(self) -> Versions:
        gigabytes = self.model.full_gigabytes
        published, copied_s_per_gb = gigabytes, constants.GATHERED_S_PER_GB.value
        received = gigabytes
        if self.by_shards:
            published /= self.learner_gpus
            received /= self.model.worker_gpus
            copied_s_per_gb = constants.COPIED_S_PER_GB.value
        return Versions(
            full_bytes=round(gigabytes * 1e9),
            delta_bytes=round(gigabytes * 1e9 * constants.DELTA_SHARE.value),
            copied_s=published * copied_s_per_gb,
            announced_s=published * constants.ANNOUNCED_S_PER_GB.value,
            sent_byte_s=constants.SENT_S_PER_GB.value / 1e9,
            link_bytes_per_s=constants.LINK_BYTES_PER_S.value,
            are_stored=self.workers > constants.SERVED_WORKERS,
            applied_s=received * constants.APPLIED_S_PER_GB.value,
            pause_s=self.rereading_s(),
        )
