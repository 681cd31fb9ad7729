"""What a step costs: GPU hours, tokens of a GPU, and the share of its arithmetic that they need.

The share of the arithmetic is the model FLOPs utilization of PaLM (arXiv 2204.02311, appendix B)
without its term for attention:

    6 N T / (s G P)    N parameters, T response tokens of the batch, s seconds of the step with its
                       wait, G GPUs of the learner, P operations a second of one of them

Six operations per parameter and token: two forward, four backward. Prompts, attention, forward
passes that only score, and layers computed twice are not counted: more tokens a second raise the
number, and more work for the same tokens does not. Adapters (LoRA) and experts that a token does
not pass need less than 6 N; there the number is too high.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from vcpo.api import VCPORunSpec
from vcpo.records.step_record import StepRecord

_PEAKS: Final = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Dense operations a second in bfloat16, from NVIDIA's data sheets (B200: of an HGX board); the
first name that is part of a device's counts."""


def peak_flops(device_name: str) -> float | None:
    """Return the dense operations a second of a GPU in bfloat16; None if it is not in the table."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What the steps of a run cost, by its model and its GPUs."""

    parameters: int
    """Of the model, all of them."""
    gpus: int
    """GPUs of the learner; 0 on a CPU."""
    peak_flops: float | None = None
    """Operations a second of one of them; None if unknown."""
    gpus_of_worker: Mapping[str, int] = field(default_factory=dict)
    """GPUs that a worker asks for, by rollout group."""

    @classmethod
    def of(cls, spec: VCPORunSpec, *, parameters: int, gpu_name: str | None) -> Self:
        """Return the costs of a run; gpu_name: of each rank's GPU, None on a CPU."""
        return cls(
            parameters=parameters,
            gpus=0 if gpu_name is None else spec.learner.ranks,
            peak_flops=None if gpu_name is None else peak_flops(gpu_name),
            gpus_of_worker={group.name: group.gpus_asked for group in spec.rollouts},
        )

    def fields(
        self,
        before: StepRecord | None,
        *,
        tokens: int,
        seconds: float,
        accepted_per_s: float,
        groups: Iterable[str],
    ) -> dict[str, Any]:
        """Return the fields of a step's record.

        before: the step before; None begins the sum anew.
        tokens: response tokens of the batch.
        seconds: of the step with its wait.
        accepted_per_s: response tokens that the learner accepts per second.
        groups: rollout group of each worker that is heard of.
        """
        of_workers = sum(self.gpus_of_worker.get(name, 0) for name in groups)
        spent_s = 0.0 if before is None or before.gpu_s is None else before.gpu_s
        learner_gpu_s = self.gpus * seconds
        trained_per_s = tokens / learner_gpu_s if learner_gpu_s > 0.0 else None
        return {
            "gpu_s": spent_s + learner_gpu_s + of_workers * seconds or None,
            "mfu": self._mfu(trained_per_s),
            "learner_gpu_tokens_per_s": trained_per_s,
            "worker_gpu_tokens_per_s": accepted_per_s / of_workers if of_workers else None,
        }

    def _mfu(self, trained_per_s: float | None) -> float | None:
        """Return the share of the peak; trained_per_s: tokens per second and GPU."""
        if self.peak_flops is None or trained_per_s is None:
            return None
        return 6.0 * self.parameters * trained_per_s / self.peak_flops
