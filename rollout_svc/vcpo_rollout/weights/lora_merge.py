"""Adapters on their way into an engine: a version brings A and B, the worker holds all the rest.

Where a run trains adapters only those are published, a hundredth of the parameters or less. Engines
take whole sets of weights, so the worker adds W + scale B A itself, from the W of the run's model:
always from that, never from the version before, so that nothing accumulates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vcpo_rollout.engines.engine import EngineError

_FIRST: Final = ".lora_A.default.weight"
_SECOND: Final = ".lora_B.default.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraMerge:
    """Makes whole sets of weights from adapters."""

    base: Mapping[str, Tensor]
    """Parameters of the run's model, by name."""
    scale: float
    """alpha / rank."""

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Tensor], policy_version: int) -> dict[str, Tensor]:
        """Whole weights of a version; layers without an adapter are those of the base.

        Raises: EngineError, naming the tensor, when one is no adapter of the model.
        """
        merged = dict(self.base)
        for name, first, second in _pairs(tensors):
            if name not in merged or merged[name].shape != (len(second), first.shape[1]):
                raise EngineError(
                    f"{name}: an adapter came for it, which the model has no place for"
                )
            weight = merged[name]
            product = second.float() @ first.float()
            merged[name] = (weight.float() + self.scale * product).to(weight.dtype)
        return merged


def _pairs(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Adapted parameters' names with A [rank, columns] and B [rows, rank]."""
    for name, first in tensors.items():
        if name.endswith(_FIRST):
            layer = name.removesuffix(_FIRST)
            if layer + _SECOND not in tensors:
                raise EngineError(f"{layer + _SECOND} is missing beside {name}")
            yield f"{layer}.weight", first, tensors[layer + _SECOND]
        elif not name.endswith(_SECOND):
            raise EngineError(f"{name} is no adapter, and the run trains adapters only")
