"""Who quantizes a rollout group's weights: vLLM, with kernels for them, or we, by rounding.

vLLM can quantize full-precision weights as it loads them, at its start and at every swap. Matrices
and the activations that meet them are then multiplied as 8-bit numbers. Where it cannot, weights
are rounded on their way into the engine (`quantize_and_noise`): the policy changes alike, its
speed does not. Embeddings and output head are left alone either way.

What vLLM 0.32.0 has for the matrices of linear layers:

    fp8_per_block     one scale per 128 x 128 of the weights, per 128 of an activation. Multiplied
                      in hardware from compute capability 8.9 on; a CPU needs AMX
    fp8_per_channel   one scale per row of the weights, per token of the activations. Runs on any
                      CPU, far slower than bfloat16 (python -m benchmarks.fp8_product)
    fp8_per_tensor    one scale per matrix: coarser, and the CPU package has no code for it
    int8_...          for experts only; linear layers stay as they are

All of them take bfloat16 and refuse float32.

Source: https://docs.vllm.ai/en/v0.32.0/features/quantization/online/ and the tables
`_ONLINE_LINEAR_METHODS`, `_POSSIBLE_FP8_BLOCK_KERNELS` and `_POSSIBLE_FP8_KERNELS` of its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vcpo.spec.workloads import Precision, Quantization

FP8_PER_BLOCK: Final = "fp8_per_block"
_FIRST_WITH_FP8: Final = 89
"""Compute capability 8.9, Ada."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What vLLM computes on."""

    platform: str
    """vLLM's name for it, such as "cuda" or "cpu"."""
    capability: int | None = None
    """CUDA's compute capability, 90 for 9.0; None when there is none or it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationPlan:
    """Who quantizes, and why; at most one does."""

    online_method: str | None = None
    """vLLM's name of what it does itself, to full-precision weights; None is nothing."""
    rounding: Quantization = Quantization.NONE
    """What weights are rounded to before the engine gets them."""
    reason: str

    def __str__(self) -> str:
        """For the log."""
        who = f"{self.rounding} by rounding" if self.online_method is None else self.online_method
        return f"{who}: {self.reason}"


def plan_quantization(
    quantization: Quantization, *, precision: Precision, device: Device | None
) -> QuantizationPlan:
    """Decide who quantizes.

    device: of vLLM; None with an engine that has no kernels for it.
    """
    if quantization is Quantization.NONE:
        return QuantizationPlan(reason="the group asks for none")
    method, reason = _online_method(quantization, precision, device)
    rounding = quantization if method is None else Quantization.NONE
    return QuantizationPlan(online_method=method, rounding=rounding, reason=reason)


def _online_method(
    quantization: Quantization, precision: Precision, device: Device | None
) -> tuple[str | None, str]:
    """What vLLM does itself, None for nothing, and why."""
    if device is None:
        return None, "the engine has no kernels for it"
    if quantization is not Quantization.FP8:
        return None, f"vLLM quantizes no linear layer to {quantization} as it loads"
    if precision is not Precision.BFLOAT16:
        return None, f"vLLM quantizes bfloat16 only, and the group's precision is {precision}"
    return _online_fp8(device)


def _online_fp8(device: Device) -> tuple[str | None, str]:
    if device.platform == "cpu":
        return None, "vLLM's fp8 for any CPU is slower than its bfloat16"
    if device.platform != "cuda":
        return None, f"vLLM's kernels for {device.platform} have not been tried"
    capability = device.capability
    if capability is None or capability < _FIRST_WITH_FP8:
        return None, f"fp8 takes a compute capability of 8.9, and this one is {_dotted(capability)}"
    return FP8_PER_BLOCK, f"compute capability {_dotted(capability)} has fp8"


def _dotted(capability: int | None) -> str:
    return "unknown" if capability is None else f"{capability // 10}.{capability % 10}"
