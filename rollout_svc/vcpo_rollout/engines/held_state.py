"""The state that a model holds: parameters and persistent buffers, and their names.

Other buffers, such as rotary frequencies, are computed when the model is built.
"""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor
from torch.nn import Module

from vcpo.service.persistent_buffers import own_buffers


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
