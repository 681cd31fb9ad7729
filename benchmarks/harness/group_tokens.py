"""A batch of trajectories of equal lengths, as trainers hold it that know no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from vcpo.wire.trajectory import Trajectory

Groups = Sequence[Sequence[Trajectory]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """The batch as a trainer of equal lengths would hold it."""

    input_ids: Tensor
    """[trajectories, tokens] int64"""
    num_prompt_tokens: int
    rollout_logprobs: Tensor
    """[trajectories, response tokens] nats"""
    rewards: Tensor
    """[trajectories]"""


def tokens_of(groups: Groups, device: torch.device | None = None) -> Tokens:
    """Return trajectories of equal lengths as tensors; device: None is the CPU."""
    flat = list(chain.from_iterable(groups))
    ids = [[*one.prompt_token_ids, *one.response_token_ids] for one in flat]
    return Tokens(
        input_ids=torch.tensor(ids, device=device),
        num_prompt_tokens=len(flat[0].prompt_token_ids),
        rollout_logprobs=torch.tensor([list(one.rollout_logprobs) for one in flat], device=device),
        rewards=torch.tensor([one.reward for one in flat], device=device),
    )


def group_advantages(group: Tokens) -> Tensor:
    """Return GRPO's advantages of one group, [trajectories]."""
    return (group.rewards - group.rewards.mean()) / group.rewards.std()
