"""The policy that training began with, kept beside the one that is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vcpo_learner.ranks.sharding import is_sharded, local_part, release


class ReferencePolicy:
    """A copy of a model's trainable parameters, with which the model can compute for a while.

    The copy takes as much memory as the parameters: on each rank, its shards of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        release(model)
        self._copies = [local_part(each.detach()).clone() for each in self._parameters()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange the model's parameters for those of the reference until the block ends."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        release(self._model)
        for at, parameter in enumerate(self._parameters()):
            copy = self._copies[at]
            if is_sharded(parameter):
                # FSDP knows the shard by its memory.
                part = local_part(parameter.detach())
                own = part.clone()
                part.copy_(copy)
                copy.copy_(own)
            else:
                # A graph that waits for its backward pass must not see a write.
                self._copies[at], parameter.data = parameter.data, copy

    def _parameters(self) -> list[nn.Parameter]:
        return [each for each in self._model.parameters() if each.requires_grad]
