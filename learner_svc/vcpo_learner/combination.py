"""The weighted sum of a batch's gradients that a step wants, before all weights are known."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mode

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Combination:
    """The sum that is wanted, sum_i (offset_i + slope_g(i)) grad f_i, before slopes are known."""

    offsets: Tensor
    """[batch]"""
    groups: Sequence[int]
    """[batch] position of each trajectory's group, from 0 on without a gap, ascending."""

    @property
    def num_groups(self) -> int:
        """Groups of the batch."""
        return self.groups[-1] + 1

    def centered(self) -> "tuple[Combination, Tensor]":
        """The same with the most frequent offset of each group moved to its slope.

        Returns: what is left, and what to add to the slopes, [num_groups]. Rewards take few values:
        most offsets become 0, and a sum of small numbers loses fewer digits.
        """
        offsets = self.offsets.tolist()
        members: list[list[float]] = [[] for _ in range(self.num_groups)]
        for offset, group in zip(offsets, self.groups, strict=True):
            members[group].append(offset)
        moved = self.offsets.new_tensor([mode(each) for each in members])
        rest = self.offsets - moved[list(self.groups)]
        return Combination(offsets=rest, groups=self.groups), moved
