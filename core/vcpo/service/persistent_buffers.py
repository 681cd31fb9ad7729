"""Persistent buffers of a model's layers: state that is no parameter and belongs to its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the core never loads it
    from torch import Tensor, nn


def own_buffers(layer: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of a layer itself, not of layers inside it, by name."""
    return {
        name: each
        for name, each in layer.named_buffers(recurse=False)
        if name not in layer._non_persistent_buffers_set
    }
