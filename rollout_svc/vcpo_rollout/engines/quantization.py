"""Decides who quantizes a rollout group's weights: vLLM's kernels, or the worker by rounding.

vLLM can quantize full-precision weights when it loads them, at its start and at every swap. It then
multiplies matrices and activations as 8-bit numbers. Otherwise the worker rounds the weights before
the engine gets them (`quantize_and_noise`): the policy changes in the same way, the speed does not.
Embeddings and output head stay unquantized in both cases.

vLLM 0.32.0 has these methods for the matrices of linear layers:

    fp8_per_block     one scale per 128 x 128 weights and per 128 activations. GPUs from compute
                      capability 8.9 on multiply in hardware; a CPU needs AMX
    fp8_per_channel   one scale per row of the weights and per token of the activations. Runs on any
                      CPU, far slower than bfloat16
    fp8_per_tensor    one scale per matrix: coarser, and the CPU package does not implement it
    int8_...          for experts only; linear layers are not quantized

All of them accept bfloat16 and refuse float32.

Source: https://docs.vllm.ai/en/v0.32.0/features/quantization/online/ and the tables
`_ONLINE_LINEAR_METHODS`, `_POSSIBLE_FP8_BLOCK_KERNELS` and `_POSSIBLE_FP8_KERNELS` of its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vcpo.api.workloads import Precision, Quantization

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
class QuantizationPlan:
    """Who quantizes, and why: vLLM, the worker, or neither."""

    online_method: str | None = None
    """The method that vLLM applies to full-precision weights, by its name; None if none."""
    rounding: Quantization = Quantization.NONE
    """The format to which the worker rounds weights before the engine gets them."""
    reason: str

    def __str__(self) -> str:
        """Describe the plan for the log."""
        who = f"{self.rounding} by rounding" if self.online_method is None else self.online_method
        return f"{who}: {self.reason}"


def plan_quantization(
    quantization: Quantization, *, precision: Precision, device: Device | None
) -> QuantizationPlan:
    """Decide who quantizes.

    device: vLLM's device; None for an engine without such kernels.
    """
    if quantization is Quantization.NONE:
        return QuantizationPlan(reason="the group asks for none")
    method, reason = _online_method(quantization, precision, device)
    rounding = quantization if method is None else Quantization.NONE
    return QuantizationPlan(online_method=method, rounding=rounding, reason=reason)


def _online_method(
    quantization: Quantization, precision: Precision, device: Device | None
) -> tuple[str | None, str]:
    """Return the method that vLLM applies itself, or None, and the reason."""
    if device is None:
        return None, "the engine has no kernels for it"
    if quantization is not Quantization.FP8:
        return None, f"vLLM quantizes no linear layer to {quantization} as it loads"
    if precision is not Precision.BFLOAT16:
        return None, f"vLLM quantizes bfloat16 only, and the group's precision is {precision}"
    if device.platform == "cpu":
        return None, "vLLM's fp8 for any CPU is slower than its bfloat16"
    if device.platform != "cuda":
        return None, f"vLLM's kernels for {device.platform} have not been tried"
    capability = device.capability
    if capability is None or capability < _FIRST_WITH_FP8:
        return (
            None,
            f"fp8 takes a compute capability of 8.9, and this one is {_version_text(capability)}",
        )
    return FP8_PER_BLOCK, f"compute capability {_version_text(capability)} has fp8"


def _version_text(capability: int | None) -> str:
    return "unknown" if capability is None else f"{capability // 10}.{capability % 10}"
