"""A step of a training loop on transformers, as anyone would write it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

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


LEARNING_RATE: Final = 1e-6
LARGEST_GRADIENT_NORM: Final = 1.0
_WEIGHT_CAP: Final = 8.0


class PlainStep:
    """Full logits, log-softmax, truncated weights, the group's mean reward, clipping, AdamW."""

    def __init__(
        self, model: PreTrainedModel, micro_batch: int, *, uses_bfloat16: bool = False
    ) -> None:
        """Take over a model; micro_batch: trajectories in a forward pass."""
        self._model, self._micro_batch, self._uses_bfloat16 = model, micro_batch, uses_bfloat16
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=LEARNING_RATE,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=model.device.type == "cuda" or None,
        )

    def take(self, groups: Groups) -> None:
        """Forward, loss and backward for each micro-batch; then clipping and AdamW."""
        batch = tokens_of(groups, self._model.device)
        rewards = batch.rewards.view(len(groups), -1)
        advantages = (rewards - rewards.mean(dim=1, keepdim=True)).flatten()
        for start in range(0, len(advantages), self._micro_batch):
            part = slice(start, start + self._micro_batch)
            self._loss(batch, part, advantages[part]).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._model.parameters(), LARGEST_GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _loss(self, batch: Tokens, part: slice, advantages: Tensor) -> Tensor:
        ids, first = batch.input_ids[part], batch.num_prompt_tokens
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._uses_bfloat16):
            logits = self._model(input_ids=ids, use_cache=False).logits[:, first - 1 : -1].float()
        logprobs = logits.log_softmax(dim=-1).gather(2, ids[:, first:, None])[..., 0]
        ratios = (logprobs.detach() - batch.rollout_logprobs[part]).sum(dim=1).exp()
        means = logprobs.mean(dim=1)
        loss: Tensor = -(ratios.clamp(max=_WEIGHT_CAP) * advantages * means).sum()
        return loss / len(batch.rewards)
