"""Merges published LoRA adapters into the base model: W + scale B A for every adapted layer.

A run that trains adapters publishes only A and B, a hundredth of the parameters or less. Where the
engine does not apply them itself (`engines.adapters`), the worker merges. It always merges into the
W of the run's model and never into the previous version, so rounding errors do not accumulate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo_rollout.engines.adapters import read_adapters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraMerge:
    """Builds full sets of weights from adapters."""

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
