"""A step of a training loop on transformers, as anyone would write it."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.harness.group_tokens import Groups, Tokens, tokens_of

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
