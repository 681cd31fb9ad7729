"""The weighted sum of a batch's gradients that a step wants, before all weights are known."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mode

import torch
from torch import Tensor, nn

from vcpo_learner.parameter_use import Factors


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

    def coefficients(self, slopes: Tensor) -> Tensor:
        """offset_i + slope_g(i), [batch]; slopes: [num_groups]."""
        return self.offsets + slopes[list(self.groups)]

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


@dataclass(slots=True, kw_only=True, eq=False)
class KeptMatrix:
    """A parameter whose sum is formed when all coefficients are known."""

    parameter: nn.Parameter
    factors: Sequence[Factors]

    def add(self, coefficients: Tensor, slopes: Tensor) -> None:
        """Add sum_i c_i G_i to the parameter's `.grad`; coefficients: [batch]."""
        for each in self.factors:
            each.add_weighted_to(_gradient_of(self.parameter), coefficients)


@dataclass(slots=True, kw_only=True, eq=False)
class ReducedParameter:
    """A parameter whose part without slopes is in its `.grad` already."""

    parameter: nn.Parameter
    group_sums: Tensor
    """[num_groups, num_elements]"""

    def reduce(self, gradients: Tensor, combination: Combination, samples: slice) -> None:
        """Add gradients [samples, num_elements] to both totals, going over them once."""
        offsets = combination.offsets[samples].to(gradients.dtype)
        groups = combination.groups[samples]
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
        """Add what the slopes [num_groups] decide to the parameter's `.grad`."""
        total = _gradient_of(self.parameter).view(-1)
        for group_sum, slope in zip(self.group_sums, slopes.tolist(), strict=True):
            total.add_(group_sum, alpha=slope)


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return parameter.grad
