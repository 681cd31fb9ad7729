"""Where the sums of per-sample gradients go, slot by slot.

The step's gradient is sum_i (offset_i + slope_g(i)) G_i. The offsets are known before the backward
pass, the slope of a group only after its last trajectory was measured. So a slot has two kinds of
sums: one weighted by the offsets, and one per group, which the group's slope weighs at the end.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from vcpo_learner.per_sample_gradients.slots import Slot, Slots


class SlotSums(Protocol):
    """The sums over the trajectories of some groups, in one micro-step or in several."""

    @property
    def num_groups(self) -> int:
        """Groups whose slopes complete the sums."""

    @property
    def keeps_factors(self) -> bool:
        """Whether a slot's sum may wait for the slopes, and then get its full coefficients."""

    def weighted_sums(self, slots: Sequence[Slot]) -> list[Tensor]:
        """Return [*slot.shape] of slots, to which their uses add sum_i offset_i G_i in place.

        The same tensors until the slots are closed; in float32 or better.
        """

    def by_groups(self, slots: Sequence[Slot]) -> list[Tensor]:
        """Return [num_groups, *slot.shape] of slots, to which uses add each group's sum of G_i.

        The same tensors until the slots are closed; in float32 or better.
        """

    def close(self, slot: Slot) -> None:
        """Take over what was added to a slot in this micro-step; it may be nothing.

        Each micro-step closes every slot exactly once, in an order that is equal on all ranks.
        """

    def complete(self, slopes: Sequence[float]) -> None:
        """Add the groups' sums, weighted by the slopes [num_groups], to the gradient; call once."""


class ParameterSums:
    """The sums of a model that one rank holds whole; what is weighted is in the `.grad`.

    keeps_factors: only if one micro-step holds all trajectories of the groups.
    Raises: ValueError if a parameter is sharded, because its `.grad` would be lost.
    """

    def __init__(self, slots: Slots, num_groups: int, *, keeps_factors: bool = True) -> None:
        self._parameters = {slot: slots.parameter(slot) for slot in slots}
        self._by_group: dict[Slot, Tensor] = {}
        self._num_groups = num_groups
        self._keeps_factors = keeps_factors
        for slot, parameter in self._parameters.items():
            if is_sharded(parameter):
                raise ValueError(
                    f"parameter {slot.name!r} is sharded: its gradient's sum would be lost on this"
                    " way; form the sums by shard"
                )

    @property
    def num_groups(self) -> int:
        return self._num_groups

    @property
    def keeps_factors(self) -> bool:
        return self._keeps_factors

    def weighted_sums(self, slots: Sequence[Slot]) -> list[Tensor]:
        """Return the parameters' `.grad`."""
        parameters = [self._parameters[slot] for slot in slots]
        fresh = [each for each in dict.fromkeys(parameters) if each.grad is None]
        zeros = _zeros([each.shape for each in fresh], fresh)
        for parameter, gradient in zip(fresh, zeros, strict=True):
            parameter.grad = gradient
        return [each.grad for each in parameters if each.grad is not None]

    def by_groups(self, slots: Sequence[Slot]) -> list[Tensor]:
        """Return the groups' sums, which stay until they are completed."""
        fresh = [slot for slot in dict.fromkeys(slots) if slot not in self._by_group]
        shapes = [(self._num_groups, *slot.shape) for slot in fresh]
        zeros = _zeros(shapes, [self._parameters[slot] for slot in fresh])
        self._by_group.update(zip(fresh, zeros, strict=True))
        return [self._by_group[slot] for slot in slots]

    def close(self, slot: Slot) -> None:
        """Do nothing: the sums are where they belong."""

    def complete(self, slopes: Sequence[float]) -> None:
        """Add the groups' sums, weighted by the slopes [num_groups], to the parameters' `.grad`."""
        weighted, sums = self.weighted_sums([*self._by_group]), [*self._by_group.values()]
        for group, slope in enumerate(slopes if sums else ()):
            torch._foreach_add_(weighted, [each[group] for each in sums], alpha=slope)
        self._by_group.clear()


def _zeros(shapes: Sequence[Sequence[int]], likes: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros of these shapes, each like a tensor; together, as a GPU writes them at once."""
    made = [like.new_empty(shape) for like, shape in zip(likes, shapes, strict=True)]
    if made:
        torch._foreach_zero_(made)
    return made


def is_sharded(parameter: nn.Parameter) -> bool:
    """Return whether a rank holds only a part of a parameter (a DTensor)."""
    # The class itself takes a second to import.
    return hasattr(parameter, "device_mesh")
