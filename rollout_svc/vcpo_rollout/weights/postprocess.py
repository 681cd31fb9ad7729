"""What happens to a version between the wire and the engine: adapters are merged, then altered.

Runs beside generation. A version that needs neither goes to the engine as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import safetensors.torch
from torch import Tensor

from vcpo.algo import NoiseSchedule
from vcpo.spec import VCPORunSpec
from vcpo.spec.workloads import Quantization, RolloutGroup
from vcpo_rollout.engines.loading import load_parameters
from vcpo_rollout.weights.lora_merge import LoraMerge
from vcpo_rollout.weights.quantize_and_noise import QuantizationAndNoise

Stage = Callable[[Mapping[str, Tensor], int], dict[str, Tensor]]
"""From tensors by name, and the version that they are; those given are left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPostprocessing:
    """The stages of a rollout group, in their order; at least one."""

    stages: Sequence[Stage]

    def __call__(self, payload: bytes, policy_version: int) -> bytes:
        """Make what the engine gets of what was published; both are safetensors files.

        Raises: EngineError when an adapter does not belong to the run's model.
        """
        tensors = safetensors.torch.load(payload)
        for stage in self.stages:
            tensors = stage(tensors, policy_version)
        return safetensors.torch.save(tensors)


def make_postprocessing(
    spec: VCPORunSpec, group: RolloutGroup, *, seed: int, rounding: Quantization
) -> WeightPostprocessing | None:
    """What a rollout group does to versions; None when it takes them as they are.

    seed: of the noise, one for each worker.
    rounding: what of the group's quantization is not left to the engine.

    Raises: ValueError, naming the field, when the model beside the adapters cannot be loaded.
    """
    stages: list[Stage] = []
    if spec.model.lora is not None:
        base = load_parameters(spec.model.name, revision=spec.model.revision)
        stages.append(LoraMerge(base=base, scale=spec.model.lora.scale))
    if rounding is not Quantization.NONE or group.noise is not None:
        noise = _schedule(spec, group)
        stages.append(QuantizationAndNoise(quantization=rounding, noise=noise, seed=seed))
    return WeightPostprocessing(stages=stages) if stages else None


def _schedule(spec: VCPORunSpec, group: RolloutGroup) -> NoiseSchedule | None:
    if group.noise is None:
        return None
    return NoiseSchedule(
        initial_sigma=group.noise.initial_sigma,
        final_sigma=group.noise.final_sigma,
        num_stages=group.noise.stages,
        total_steps=spec.steps,
    )
