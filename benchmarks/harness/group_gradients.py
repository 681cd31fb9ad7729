"""One group's estimates of the policy gradient under several baselines, from the same gradients.

g = (1/n) sum_i A_i h_i,    h_i = min(w_i, cap) grad (mean token log-probability of y_i)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from vcpo.algo import Baseline, advantages, optimal_baseline, truncated_weight

RIVALS: Final = (Baseline.NONE.value, Baseline.GROUP_MEAN.value, Baseline.RLOO.value)
OPOB: Final = Baseline.OPOB.value
OPOB_OF_OTHERS: Final = "opobOfOthers"
OPOB_OF_OTHER_GROUPS: Final = "opobOfOtherGroups"
_Item = TypeVar("_Item")

NAMES: Final = (*RIVALS, OPOB, OPOB_OF_OTHERS, OPOB_OF_OTHER_GROUPS)
"""The estimators, E of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupGradients:
    """The estimates and numbers of one group of n trajectories."""

    rewards: Sequence[float]
    """[n]"""
    squared_norms: Sequence[float]
    """[n] ||h_i||^2."""
    log_weights: Sequence[float]
    """[n] nats, untruncated."""
    estimates: Tensor
    """[E, parameters] in the order of NAMES; the last is the mean h until other groups are seen."""


def group_gradients(
    objectives: Tensor,
    parameters: Sequence[nn.Parameter],
    *,
    rewards: Sequence[float],
    log_weights: Sequence[float],
    weight_cap: float,
) -> GroupGradients:
    """Estimates of one group.

    objectives: [n] mean token log-probabilities with their graph, n at least 2.
    rewards, log_weights: [n]; the weights in nats, untruncated.
    """
    weights = [truncated_weight(log_weight, weight_cap) for log_weight in log_weights]
    unweighted = gradients_of_each(objectives, parameters)
    weighted = unweighted * unweighted.new_tensor(weights)[:, None]
    norms = torch.linalg.vector_norm(weighted, dim=1).double().square().tolist()
    rows = weighted.new_tensor(factors(rewards, norms))
    return GroupGradients(
        rewards=rewards,
        squared_norms=norms,
        log_weights=log_weights,
        estimates=rows @ weighted / len(rewards),
    )


def gradients_of_each(objectives: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Gradient of each of [n] objectives, [n, parameters], in one batched backward pass."""
    selectors = torch.eye(len(objectives), dtype=objectives.dtype)
    parts = torch.autograd.grad(
        objectives, parameters, grad_outputs=(selectors,), is_grads_batched=True
    )
    return torch.cat([part.reshape(len(objectives), -1) for part in parts], dim=1)


def factors(rewards: Sequence[float], squared_norms: Sequence[float]) -> list[list[float]]:
    """Factors of a group's h_i, [E][n] in the order of NAMES; 1 where b* is of other groups.

    rewards, squared_norms: [n] as for `optimal_baseline`, n at least 2.
    """
    rows = [advantages(rewards, Baseline(name), squared_norms) for name in (*RIVALS, OPOB)]
    of_others = [
        reward - optimal_baseline(without(rewards, at), without(squared_norms, at))
        for at, reward in enumerate(rewards)
    ]
    return [*rows, of_others, [1.0] * len(rewards)]


def with_other_baselines(block: Sequence[GroupGradients]) -> Tensor:
    """Return estimates of groups, [groups, E, parameters]; the last takes b* of the others."""
    estimates = torch.stack([group.estimates for group in block])
    no_baseline, last = NAMES.index(Baseline.NONE.value), NAMES.index(OPOB_OF_OTHER_GROUPS)
    for at in range(len(block)):
        others = without(block, at)
        baseline = optimal_baseline(
            [reward for group in others for reward in group.rewards],
            [norm for group in others for norm in group.squared_norms],
        )
        estimates[at, last] = estimates[at, no_baseline] - baseline * estimates[at, last]
    return estimates


def without(values: Sequence[_Item], position: int) -> list[_Item]:
    """Return all elements but one."""
    return [*values[:position], *values[position + 1 :]]
