"""Merges published LoRA adapters into the base model: W + scale B A for every adapted layer.

A run that trains adapters publishes only A and B, a hundredth of the parameters or less. Engines
take full sets of weights, so the worker merges. It always merges into the W of the run's model and
never into the previous version, so rounding errors do not accumulate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vcpo_rollout.engines.engine import EngineError

_SUFFIX_A: Final = ".lora_A.default.weight"
_SUFFIX_B: Final = ".lora_B.default.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraMerge:
    """Builds full sets of weights from adapters."""

    base: Mapping[str, Tensor]
    """Parameters of the run's model, by name."""
    scale: float
    """alpha / rank."""

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Tensor], policy_version: int) -> dict[str, Tensor]:
        """Return the full weights of a version; layers without an adapter equal the base.

        Raises: EngineError, naming the tensor, when a tensor is not an adapter of the model.
        """
        merged = dict(self.base)
        for name, matrix_a, matrix_b in _adapters(tensors):
            if name not in merged or merged[name].shape != (len(matrix_b), matrix_a.shape[1]):
                raise EngineError(
                    f"{name}: the model has no parameter that fits the adapter published for it"
                )
            weight = merged[name]
            product = matrix_b.float() @ matrix_a.float()
            merged[name] = (weight.float() + self.scale * product).to(weight.dtype)
        return merged


def _adapters(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of each adapted parameter with A [rank, columns] and B [rows, rank]."""
    for name, matrix_a in tensors.items():
        if name.endswith(_SUFFIX_A):
            layer = name.removesuffix(_SUFFIX_A)
            if layer + _SUFFIX_B not in tensors:
                raise EngineError(f"{layer + _SUFFIX_B} is missing beside {name}")
            yield f"{layer}.weight", matrix_a, tensors[layer + _SUFFIX_B]
        elif not name.endswith(_SUFFIX_B):
            raise EngineError(f"{name} is not an adapter, and this run trains adapters only")
