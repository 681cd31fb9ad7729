"""Published LoRA adapters: their form, and who applies them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from vcpo_rollout.engines.engine import EngineError

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIX_A: Final = ".lora_A.default.weight"
_SUFFIX_B: Final = ".lora_B.default.weight"
SERVED_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM reserves room; an adapter takes the next one that holds it."""


class AdapterUse(StrEnum):
    """Who applies adapters."""

    SERVED = "served"
    """vLLM, beside its base model."""
    MERGED = "merged"
    """The worker, which gives its engine full sets of weights."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """The adapter of one linear layer."""

    layer: str
    """Name of the layer in the model without adapters."""
    a: Tensor
    """[rank, columns]."""
    b: Tensor
    """[rows, rank]."""


def read_adapters(
    tensors: Mapping[str, Tensor], base_shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Adapter]:
    """Yield a published version's adapters.

    base_shapes: the shapes of the model's parameters, by name.

    Raises:
        EngineError: naming the tensor, when one is not part of an adapter of the model.
    """
    for name, a in tensors.items():
        if name.endswith(_SUFFIX_A):
            layer = name.removesuffix(_SUFFIX_A)
            b = tensors.get(layer + _SUFFIX_B)
            if b is None:
                raise EngineError(f"{layer + _SUFFIX_B} is missing beside {name}")
            if base_shapes.get(f"{layer}.weight") != (len(b), a.shape[1]) or len(a) != b.shape[1]:
                raise EngineError(
                    f"{layer}.weight: the model has no parameter that fits the adapter published "
                    f"for it, of shapes {list(a.shape)} and {list(b.shape)}"
                )
            yield Adapter(layer=layer, a=a, b=b)
        elif not name.endswith(_SUFFIX_B):
            raise EngineError(f"{name} is not an adapter, and this run trains adapters only")
