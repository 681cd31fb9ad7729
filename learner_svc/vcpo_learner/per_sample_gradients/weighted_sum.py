"""The weighted sum of a batch's gradients; its weights are complete after the backward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from vcpo_learner.device import to_device
from vcpo_learner.per_sample_gradients.factors import Factors
from vcpo_learner.per_sample_gradients.slot_sums import SlotSums
from vcpo_learner.per_sample_gradients.slots import Slot


class Part(NamedTuple):
    """A slot, or one of its matrices."""

    slot: Slot
    matrix: int | None = None

    @property
    def shape(self) -> torch.Size:
        return self.slot.shape if self.matrix is None else self.slot.shape[1:]


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
    _weights: dict[tuple[int, int, torch.dtype], Tensor] = field(init=False, default_factory=dict)
    """[1 + groups of a range, batch] offsets, and membership, by range and number type."""

    def __post_init__(self) -> None:
        self._has_offset = (self.offsets != 0.0).tolist()
        self._numbers = to_device(torch.tensor(self.groups), self.offsets.device)

    def coefficients(self, slopes: Tensor) -> Tensor:
        return self.offsets + slopes[self._numbers]

    def add_samples(self, parts: Sequence[Part], gradients: Tensor, samples: slice) -> None:
        """Add gradients to both sums of some parts, reading them once.

        gradients: [samples, elements of all parts, one part after another]
        """
        first, last = self.groups[samples][0], self.groups[samples][-1]
        sums = self._sums(parts, slice(first, last + 1))
        weights = self._weights_of(first, last, gradients.dtype)[:, samples]
        if len(gradients) == len(parts) == 1:
            if self._has_offset[samples.start]:
                sums[0].addcmul_(gradients[0], weights[0])
            sums[1].add_(gradients[0])
            return
        sizes = [part.shape.numel() for part in parts]
        found = torch.split(weights @ gradients, sizes, dim=1)
        torch._foreach_add_(sums, [row for each in found for row in each.unbind()])

    def _sums(self, parts: Sequence[Part], groups: slice) -> list[Tensor]:
        """Views [elements] of both sums of parts: the weighted one, and that of each group."""
        slots = [part.slot for part in parts]
        found: list[Tensor] = []
        both = zip(self.sums.weighted_sums(slots), self.sums.by_groups(slots), strict=True)
        for (_, matrix), (weighted, by_group) in zip(parts, both, strict=True):
            rows = [weighted, *by_group[groups].unbind()]
            found += [(row if matrix is None else row[matrix]).view(-1) for row in rows]
        return found

    def _weights_of(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Return [1 + groups from first to last, batch]: offsets, and who is in which group."""
        key = first, last, dtype
        if key not in self._weights:
            numbers = torch.arange(first, last + 1, device=self.offsets.device)[:, None]
            rows = [self.offsets[None].to(dtype), (numbers == self._numbers).to(dtype)]
            self._weights[key] = torch.cat(rows)
        return self._weights[key]

    def add_factors(self, slot: Slot, factors: Factors) -> None:
        """Add a matrix's gradients to both sums of a slot, as products over all tokens."""
        (weighted,), (by_group,) = self.sums.weighted_sums([slot]), self.sums.by_groups([slot])
        factors.add_weighted_to(weighted, self.offsets[:, None, None])
        for group in sorted(set(self.groups)):
            first = self.groups.index(group)
            samples = slice(first, first + self.groups.count(group))
            part = factors.part(samples)
            ones = torch.ones_like(self.offsets[samples, None, None])
            part.add_weighted_to(by_group[group], ones)


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
