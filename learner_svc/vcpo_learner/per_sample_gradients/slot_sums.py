"""Where the sums of per-sample gradients go, slot by slot.

The step's gradient is sum_i (offset_i + slope_g(i)) G_i. The offsets are known before the backward
pass, the slope of a group only after its last trajectory was measured. So a slot has two kinds of
sums: one weighted by the offsets, and one per group, which the group's slope weighs at the end.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, contiguous_format, nn, zeros_like

from vcpo_learner.per_sample_gradients.slots import Slot, Slots


class SlotSums(Protocol):
    """The sums over the trajectories of some groups, in one micro-step or in several."""

    @property
    def num_groups(self) -> int:
        """Groups whose slopes complete the sums."""

    @property
    def keeps_factors(self) -> bool:
        """Whether a slot's sum may wait for the slopes, and then get its full coefficients."""

    def weighted_sum(self, slot: Slot) -> Tensor:
        """Return [*slot.shape], to which a use of the slot adds sum_i offset_i G_i in place.

        The same tensor until the slot is closed; in float32 or better.
        """

    def by_group(self, slot: Slot) -> Tensor:
        """Return [num_groups, *slot.shape], to which a use adds each group's sum of G_i in place.

        The same tensor until the slot is closed; in float32 or better.
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
        """Groups whose slopes complete the sums."""
        return self._num_groups

    @property
    def keeps_factors(self) -> bool:
        """Whether a slot's sum may wait for the slopes."""
        return self._keeps_factors

    def weighted_sum(self, slot: Slot) -> Tensor:
        """Return the parameter's `.grad`."""
        parameter = self._parameters[slot]
        if parameter.grad is None:
            parameter.grad = zeros_like(parameter, memory_format=contiguous_format)
        return parameter.grad

    def by_group(self, slot: Slot) -> Tensor:
        """Return the groups' sums, which stay until they are completed."""
        if slot not in self._by_group:
            shape = (self._num_groups, *slot.shape)
            self._by_group[slot] = self._parameters[slot].new_zeros(shape)
        return self._by_group[slot]

    def close(self, slot: Slot) -> None:
        """Do nothing: the sums are where they belong."""

    def complete(self, slopes: Sequence[float]) -> None:
        """Add the groups' sums, weighted by the slopes [num_groups], to the parameters' `.grad`."""
        for slot, by_group in self._by_group.items():
            weighted = self.weighted_sum(slot)
            for group_sum, slope in zip(by_group, slopes, strict=True):
                weighted.add_(group_sum, alpha=slope)
        self._by_group.clear()


def is_sharded(parameter: nn.Parameter) -> bool:
    """Return whether a rank holds only a part of a parameter (a DTensor)."""
    # The class itself takes a second to import.
    return hasattr(parameter, "device_mesh")
