"""The weighted sum of a batch's gradients; its weights are complete after the backward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vcpo_learner.per_sample_gradients.layer_gradients import Factors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightedSum:
    """The sum sum_i (offset_i + slope_g(i)) grad f_i, before the slopes are known."""

    offsets: Tensor
    """[batch] float64"""
    groups: Sequence[int]
    """[batch] number of each trajectory's group: ascending from 0, without a gap."""

    @property
    def num_groups(self) -> int:
        """Number of groups in the batch."""
        return self.groups[-1] + 1

    def coefficients(self, slopes: Tensor) -> Tensor:
        """Return offset_i + slope_g(i), [batch]; slopes: [num_groups]."""
        return self.offsets + slopes[list(self.groups)]


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


@dataclass(slots=True, kw_only=True, eq=False)
class KeptMatrix:
    """A matrix whose sum is formed when all coefficients are known."""

    parameter: nn.Parameter
    factors: Sequence[Factors]

    def add(self, coefficients: Tensor, slopes: Tensor) -> None:
        """Add sum_i c_i G_i to the parameter's `.grad`; coefficients: [batch]."""
        for each in self.factors:
            each.add_weighted_to(_gradient_of(self.parameter), coefficients)


@dataclass(slots=True, kw_only=True, eq=False)
class ReducedParameter:
    """A parameter whose `.grad` already holds the sum weighted by the offsets."""

    parameter: nn.Parameter
    group_sums: Tensor
    """[num_groups, num_elements]"""

    def reduce(self, gradients: Tensor, weighted_sum: WeightedSum, samples: slice) -> None:
        """Add gradients [samples, num_elements] to both totals, reading them once."""
        offsets = weighted_sum.offsets[samples].to(gradients.dtype)
        groups = weighted_sum.groups[samples]
        total = _gradient_of(self.parameter).view(-1)
        if len(gradients) == 1:
            if offset := float(offsets):
                total.add_(gradients[0], alpha=offset)
            self.group_sums[groups[0]] += gradients[0]
            return
        first, last = groups[0], groups[-1]
        rows = torch.tensor(groups, device=gradients.device)
        members = torch.arange(first, last + 1, device=gradients.device)[:, None] == rows
        sums = torch.cat([offsets[None], members.to(gradients.dtype)]) @ gradients
        total.add_(sums[0])
        self.group_sums[first : last + 1] += sums[1:]

    def add(self, coefficients: Tensor, slopes: Tensor) -> None:
        """Add the group sums, weighted by the slopes [num_groups], to the parameter's `.grad`."""
        total = _gradient_of(self.parameter).view(-1)
        for group_sum, slope in zip(self.group_sums, slopes.tolist(), strict=True):
            total.add_(group_sum, alpha=slope)


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return parameter.grad
