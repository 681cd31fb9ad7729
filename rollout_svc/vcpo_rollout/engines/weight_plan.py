"""Decides what becomes of versions in a worker: who quantizes them, and who applies adapters.

vLLM can quantize full-precision weights as it loads them, and then multiplies 8-bit numbers.
Otherwise the worker rounds them before (`weights.postprocess`): the policy changes in the
same way, the speed does not. Of vLLM's methods `fp8_per_block` is used; GPUs from compute
capability 8.9 on have it in hardware. All take bfloat16, and none is for linear layers in int8.

vLLM also computes x W + scale (x A) B beside a base model that it loads once. Otherwise the worker
merges every version into a full set of weights: W + scale B A.

Source: vLLM 0.32.0, https://docs.vllm.ai/en/v0.32.0/features/quantization/online/ and the tables
`_ONLINE_LINEAR_METHODS` and `_POSSIBLE_FP8_BLOCK_KERNELS` of its source; `vllm.lora`.
"""

from dataclasses import dataclass
from typing import Final

from vcpo.api.workloads import Lora, Precision, Quantization, RolloutGroup
from vcpo_rollout.engines.adapters import SERVED_RANKS, AdapterUse

FP8_PER_BLOCK: Final = "fp8_per_block"
_FIRST_WITH_FP8: Final = 89
"""Compute capability 8.9, Ada."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device on which vLLM computes."""

    platform: str
    """vLLM's name for it, such as "cuda" or "cpu"."""
    capability: int | None = None
    """CUDA's compute capability, 90 for 9.0; None when it is absent or unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """What becomes of versions."""

    online_method: str | None = None
    """The method by which vLLM quantizes full-precision weights, by its name; None if none."""
    rounding: Quantization = Quantization.NONE
    """The format to which the worker rounds weights before the engine gets them."""
    adapters: AdapterUse | None = None
    """Who applies adapters; None for a run without."""
    reasons: tuple[str, ...] = ()
    """Each decision and why, for the log."""


def decide(lora: Lora | None, group: RolloutGroup, device: Device | None) -> WeightPlan:
    """Decide for a rollout group.

    device: vLLM's; None for an engine that takes full sets of weights only.
    """
    method, rounding, use = None, Quantization.NONE, None
    reasons = []
    if group.quantization is not Quantization.NONE:
        obstacle = _obstacle_to_fp8(group, device)
        method = None if obstacle else FP8_PER_BLOCK
        rounding = group.quantization if obstacle else rounding
        reasons.append(f"quantization: {method or f'{rounding} by rounding: {obstacle}'}")
    if lora is not None:
        obstacle = _obstacle_to_serving(lora, group, rounding, device)
        use = AdapterUse.MERGED if obstacle else AdapterUse.SERVED
        reasons.append(f"adapters: {use}{obstacle and f': {obstacle}'}")
    return WeightPlan(online_method=method, rounding=rounding, adapters=use, reasons=tuple(reasons))


def _obstacle_to_fp8(group: RolloutGroup, device: Device | None) -> str:
    if device is None:
        return "the engine has no kernels for it"
    if group.quantization is not Quantization.FP8:
        return f"vLLM quantizes no linear layer to {group.quantization} as it loads"
    if group.number_format is not Precision.BFLOAT16:
        return f"vLLM quantizes bfloat16 only, and the precision is {group.number_format}"
    if device.platform != "cuda":
        return f"vLLM's fp8 on {device.platform} is slow, or was not tried"
    if (device.capability or 0) < _FIRST_WITH_FP8:
        return f"fp8 takes a compute capability of 8.9, and this one is {device.capability}"
    return ""


def _obstacle_to_serving(
    lora: Lora, group: RolloutGroup, rounding: Quantization, device: Device | None
) -> str:
    if device is None:
        return f"engine '{group.engine_name}' takes full sets of weights"
    if rounding is not Quantization.NONE:
        return f"the worker rounds weights and adapters together to {rounding}"
    if group.noise is not None:
        return "noise changes the weights of every version"
    if lora.rank > SERVED_RANKS[-1]:
        return f"vLLM serves ranks up to {SERVED_RANKS[-1]}, and this one is {lora.rank}"
    if device.platform != "cpu" and group.number_format is not Precision.BFLOAT16:
        return f"a GPU serves adapters in bfloat16 only, and not in {group.number_format}"
    return ""
