"""The weighted sum of a batch's gradients; its weights are complete after the backward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vcpo_learner.per_sample_gradients.factors import Factors
from vcpo_learner.per_sample_gradients.slot_sums import SlotSums
from vcpo_learner.per_sample_gradients.slots import Slot


@dataclass(slots=True, kw_only=True, eq=False)
class WeightedSum:
    """The sum sum_i (offset_i + slope_g(i)) grad f_i, before the slopes are known.

    Micro-steps that share `sums` add up to one sum.
    """

    offsets: Tensor
    """[batch] float64"""
    groups: Sequence[int]
    """[batch] number of each trajectory's group in `sums`, ascending; gaps are groups without a
    trajectory here."""
    sums: SlotSums
    _has_offset: Sequence[bool] = field(init=False)
    _numbers: Tensor = field(init=False)
    """`groups` on the device: a copy for each slot would wait for it each time."""

    def __post_init__(self) -> None:
        self._has_offset = (self.offsets != 0.0).tolist()
        self._numbers = torch.tensor(self.groups, device=self.offsets.device)

    def coefficients(self, slopes: Tensor) -> Tensor:
        """Return offset_i + slope_g(i), [batch]; slopes: [num_groups]."""
        return self.offsets + slopes[self._numbers]

    def add_samples(
        self, slot: Slot, gradients: Tensor, samples: slice, matrix: int | None = None
    ) -> None:
        """Add gradients [samples, num_elements] to both sums of a slot, reading them once.

        matrix: which one of the slot's matrices they are of; None for a slot that is one.
        """
        weighted, by_group = self.sums.weighted_sum(slot), self.sums.by_group(slot)
        if matrix is not None:
            weighted, by_group = weighted[matrix], by_group[:, matrix]
        weighted, by_group = weighted.view(-1), by_group.view(self.sums.num_groups, -1)
        first, last = self.groups[samples][0], self.groups[samples][-1]
        offsets = self.offsets[samples].to(gradients.dtype)
        if len(gradients) == 1:
            if self._has_offset[samples.start]:
                weighted.addcmul_(gradients[0], offsets)
            by_group[first].add_(gradients[0])
            return
        numbers = torch.arange(first, last + 1, device=gradients.device)[:, None]
        members = (numbers == self._numbers[samples]).to(gradients.dtype)
        sums = torch.cat([offsets[None], members]) @ gradients
        weighted.add_(sums[0])
        by_group[first : last + 1].add_(sums[1:])

    def add_factors(self, slot: Slot, factors: Factors) -> None:
        """Add a matrix's gradients to both sums of a slot, as products over all tokens."""
        factors.add_weighted_to(self.sums.weighted_sum(slot), self.offsets)
        by_group = self.sums.by_group(slot)
        for group in sorted(set(self.groups)):
            first = self.groups.index(group)
            samples = slice(first, first + self.groups.count(group))
            part = factors.part(samples)
            part.add_weighted_to(by_group[group], torch.ones_like(self.offsets[samples]))


def relative_offsets(offsets: Sequence[float], squared_weights: Sequence[float]) -> list[float]:
    """Return the offsets of one group minus the offset with the largest weight in it.

    If one trajectory dominates its group, the optimal baseline is close to its reward. Its offset
    and slope then cancel, and the rest that its large gradient leaves in both sums hides the other
    gradients in float32. After the subtraction, its offset is 0 and its slope nearly 0. If all
    weights are similar, most offsets become 0, as rewards take few values.
    squared_weights: [n] expected squared weight of each trajectory's gradient, at least 0.
    """
    totals: dict[float, float] = {}
    for offset, weight in zip(offsets, squared_weights, strict=True):
        totals[offset] = totals.get(offset, 0.0) + weight
    reference = max(totals, key=totals.__getitem__)
    return [offset - reference for offset in offsets]
