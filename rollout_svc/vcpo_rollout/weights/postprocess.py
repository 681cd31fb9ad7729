"""Transforms a received version before the engine gets it: LoRA merge, quantization and noise.

It runs beside generation. A version that needs no transformation reaches the engine unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import safetensors.torch
import torch
from torch import Tensor

from vcpo.algo.rollout_noise import NoiseSchedule
from vcpo.api import VCPORunSpec
from vcpo.api.workloads import Quantization, RolloutGroup
from vcpo_rollout.engines.adapters import AdapterUse, read_adapters
from vcpo_rollout.engines.engine import PolicyWeights
from vcpo_rollout.engines.loading import load_state
from vcpo_rollout.engines.payload_tensors import tensors_of
from vcpo_rollout.weights.quantize_and_noise import QuantizationAndNoise

WeightTransform = Callable[[Mapping[str, Tensor], int], dict[str, Tensor]]
"""Takes tensors by name and their policy version; returns new tensors and changes no input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPostprocessing:
    """The transforms of a rollout group, in order; at least one."""

    transforms: Sequence[WeightTransform]

    def __call__(self, weights: PolicyWeights) -> PolicyWeights:
        """Return the engine's version for a published one.

        No changes are known: an element that was not published anew may differ as well.

        Raises: EngineError when an adapter does not belong to the run's model.
        """
        tensors = tensors_of(weights.payload)
        for transform in self.transforms:
            tensors = transform(tensors, weights.policy_version)
        return PolicyWeights(weights.policy_version, safetensors.torch.save(tensors))


def make_postprocessing(
    spec: VCPORunSpec,
    group: RolloutGroup,
    *,
    seed: int,
    rounding: Quantization,
    adapters: AdapterUse | None,
) -> WeightPostprocessing | None:
    """Make a rollout group's postprocessing; None if the group uses versions as published.

    seed: seeds the noise; every worker has its own.
    rounding: the quantization that the engine does not do itself.
    adapters: who applies the adapters of a run that trains some; None for other runs.

    Raises: ValueError, naming the field, when the base model of the adapters cannot be loaded.
    """
    transforms: list[WeightTransform] = []
    if spec.model.lora is not None and adapters is AdapterUse.MERGED:
        base = load_state(
            spec.model.name,
            revision=spec.model.revision,
            trust_remote_code=spec.model.trust_remote_code,
        )
        transforms.append(LoraMerge(base=base, scale=spec.model.lora.scale))
    if rounding is not Quantization.NONE or group.noise is not None:
        noise = None
        if group.noise is not None:
            noise = NoiseSchedule(
                initial_sigma=group.noise.initial_sigma,
                final_sigma=group.noise.final_sigma,
                num_stages=group.noise.stages,
                total_steps=spec.steps,
            )
        transforms.append(QuantizationAndNoise(quantization=rounding, noise=noise, seed=seed))
    return WeightPostprocessing(transforms=transforms) if transforms else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraMerge:
    """Builds full sets of weights from adapters: W + scale B A for every adapted layer.

    W is always that of the run's model, so rounding errors do not accumulate over versions.
    """

    base: Mapping[str, Tensor]
    """State of the run's model, by name."""
    scale: float
    """alpha / rank."""

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Tensor], policy_version: int) -> dict[str, Tensor]:
        """Return the full weights of a version; layers without an adapter equal the base.

        Raises: EngineError, naming the tensor, when a tensor is not an adapter of the model.
        """
        merged = dict(self.base)
        shapes = {name: tuple(each.shape) for name, each in self.base.items()}
        for adapter in read_adapters(tensors, shapes):
            name = f"{adapter.layer}.weight"
            weight = self.base[name]
            product = adapter.b.float() @ adapter.a.float()
            merged[name] = (weight.float() + self.scale * product).to(weight.dtype)
        return merged
