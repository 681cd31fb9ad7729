"""The state that a model holds: parameters and persistent buffers, their names and checksums.

Other buffers, such as rotary frequencies, are computed when the model is built.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor
from torch.nn import Module, Parameter

from vcpo.service.persistent_buffers import own_buffers
from vcpo_rollout.engines.payload_tensors import WholeTensor


def held_names(model: Module) -> list[list[str]]:
    """Return all names of each tensor of the state, in the order of the model's modules."""
    names: defaultdict[Tensor, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False)) | own_buffers(module)
        for name, tensor in own.items():
            names[tensor].append(f"{path}.{name}".removeprefix("."))
    return list(names.values())


def held_tensor(model: Module, name: str) -> Tensor:
    """Return a tensor of the state by one of its names."""
    path, _, own = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), own)
    return tensor


def held_tensors(model: Module) -> dict[str, Tensor]:
    """Return the state, each tensor under its first name."""
    return {names[0]: held_tensor(model, names[0]) for names in held_names(model)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChecksums:
    """What a model must hold after a swap: of each tensor a type, and the sum of its bytes in it.

    The sums of parameters are those of the published values rounded to the model's type. Those of
    buffers are those of the published bytes, because buffers are not rounded.
    """

    by_name: Mapping[str, tuple[torch.dtype, int]]

    @classmethod
    def of_version(cls, model: Module, published: Mapping[str, WholeTensor]) -> StateChecksums:
        """Return those of a version that `read_weights` has read for the model."""
        found = {}
        for name, parts in published.items():
            held = held_tensor(model, name)
            dtype = held.dtype if isinstance(held, Parameter) else parts[0].rows.dtype
            found[name] = (dtype, _xxh3((part.rows for part in parts), dtype))
        return cls(by_name=found)

    def differing(self, model: Module) -> list[str]:
        """Return the tensors that the model holds with other values, by name."""
        return [
            name
            for name, (dtype, xxh3) in self.by_name.items()
            if _xxh3([held_tensor(model, name)], dtype) != xxh3
        ]


def _xxh3(parts: Iterable[Tensor], dtype: torch.dtype) -> int:
    """Return the xxh3-64 of the bytes of consecutive rows, in a type."""
    digest = xxhash.xxh3_64()
    for part in parts:
        flat = part.detach().to("cpu", dtype).reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.intdigest()
