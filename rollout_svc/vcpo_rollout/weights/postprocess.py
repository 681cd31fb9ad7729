"""Transforms a received version before the engine gets it: LoRA merge, quantization and noise.

It runs beside generation. A version that needs no transformation reaches the engine unchanged.

    fp8     matrices as E4M3 numbers with one scale per block of 128 x 128, amax / 448
    int8    matrices as integers from -127 to 127 with one scale per row, amax / 127
    noise   N(0, sigma^2) added to the weights of normalizations, new for every version

Every engine takes the result as ordinary numbers; embeddings and output head are unchanged. Each
version is computed from the published weights, so errors do not accumulate.

Sources: block sizes of Jet-RL, arXiv 2601.14243 (weights only; activations are not quantized here);
noise of QeRL, arXiv 2510.11696.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional

from vcpo.api import VCPORunSpec
from vcpo.api.workloads import Quantization, RolloutGroup
from vcpo_rollout.engines.adapters import AdapterUse, read_adapters
from vcpo_rollout.engines.engine import PolicyWeights
from vcpo_rollout.engines.loading import load_state
from vcpo_rollout.engines.loading_weights import tensors_of


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSchedule:
    """Standard deviation of the noise on the normalization weights at each step of a run.

    A run is divided into K equal stages. The first has no noise. Over the others it falls
    geometrically, sigma_j = s0 (sK / s0)^(j / (K - 2)), j = 0 .. K - 2. Noise adds no bias, but
    lowers the ESS ratio at lag 0 (`vcpo.algo.ess.calibration`).
    Source: QeRL, arXiv 2510.11696, adaptive quantization noise; the exponent as in its code.
    """

    initial_sigma: float
    """Standard deviation of the first stage with noise, above 0."""
    final_sigma: float
    """Standard deviation of the last stage, above 0."""
    num_stages: int
    """Number of stages, at least 3: one without noise and two with noise."""
    total_steps: int
    """Optimizer steps of the run, at least 1."""

    def sigma(self, step: int) -> float:
        """Return the standard deviation at a step counted from 0; steps past the end keep it."""
        stage = min(self.num_stages - 1, step * self.num_stages // self.total_steps)
        if stage == 0:
            return 0.0
        share = (stage - 1) / (self.num_stages - 2)
        return self.initial_sigma * math.pow(self.final_sigma / self.initial_sigma, share)


_BLOCK: Final = 128
_LARGEST_E4M3: Final = 448.0
_LARGEST_INT8: Final = 127.0
_UNCHANGED_NAMES: Final = ("embed", "lm_head", "wte", "wpe")
"""Parts of the names of embeddings and output heads."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationAndNoise:
    """The transform that a rollout group applies to every version."""

    quantization: Quantization
    noise: NoiseSchedule | None
    seed: int
    """Seeds the noise; workers with different seeds explore differently."""

    def __call__(self, tensors: Mapping[str, Tensor], policy_version: int) -> dict[str, Tensor]:
        """Return the transformed tensors of a version, by name; the input does not change."""
        changed = dict(tensors)
        if self.quantization is not Quantization.NONE:
            rounding = _ROUNDING[self.quantization]
            for name, tensor in tensors.items():
                if is_matrix(name, tensor):
                    changed[name] = rounding(tensor)
        sigma = 0.0 if self.noise is None else self.noise.sigma(policy_version)
        if sigma > 0.0:
            for name, tensor in tensors.items():
                if is_norm_weight(name, tensor):
                    # The noise of a name and version does not depend on the order of the tensors.
                    seed = zlib.crc32(f"{self.seed}/{policy_version}/{name}".encode())
                    generator = torch.Generator().manual_seed(seed)
                    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
                    noisy = tensor.float() + sigma * noise.to(tensor.device)
                    changed[name] = noisy.to(tensor.dtype)
        return changed


def is_matrix(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the matrix of a linear layer inside the network."""
    is_table = not tensor.is_floating_point()  # a buffer
    return tensor.ndim == 2 and not is_table and not any(part in name for part in _UNCHANGED_NAMES)


def is_norm_weight(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the scale of a normalization."""
    *path, kind = name.split(".")
    return tensor.ndim == 1 and kind == "weight" and bool(path) and "norm" in path[-1]


def round_to_fp8(matrix: Tensor) -> Tensor:
    """Round [rows, columns] to E4M3 in blocks of 128 x 128 with one scale per block."""
    rows, columns = matrix.shape
    padded = functional.pad(matrix.float(), (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.view(len(padded) // _BLOCK, _BLOCK, -1, _BLOCK)
    scale = _scale(blocks.abs().amax(dim=(1, 3), keepdim=True), _LARGEST_E4M3)
    rounded = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    # Without the padding, in memory too: a file takes no other tensors.
    return rounded.view(padded.shape)[:rows, :columns].to(matrix.dtype).contiguous()


def round_to_int8(matrix: Tensor) -> Tensor:
    """Round [rows, columns] to integers of 8 bits with one scale per row."""
    wide = matrix.float()
    scale = _scale(wide.abs().amax(dim=1, keepdim=True), _LARGEST_INT8)
    return ((wide / scale).round() * scale).to(matrix.dtype)


def _scale(largest: Tensor, limit: float) -> Tensor:
    return torch.where(largest > 0.0, largest / limit, torch.ones_like(largest))


_ROUNDING: Final[Mapping[Quantization, Callable[[Tensor], Tensor]]] = {
    Quantization.FP8: round_to_fp8,
    Quantization.INT8: round_to_int8,
}
