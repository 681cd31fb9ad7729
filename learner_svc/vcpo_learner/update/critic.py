"""A small value head: the expected reward before each token, from the policy's own states.

The head is linear in the policy's last hidden states, which it does not change, and has its own
optimizer. It takes one step per batch, as the policy does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from vcpo.algo import VTrace, vtrace

LEARNING_RATE: Final = 1e-3
"""Learning rate of AdamW; the inputs have unit size, as they come from a normalization."""


class Critic:
    """Predicts values, computes advantages by V-trace, and fits the values. Owner: the update."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        self._head = nn.Linear(hidden_size, 1).to(device)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self._optimizer = torch.optim.AdamW(
            self._head.parameters(), lr=LEARNING_RATE, weight_decay=0.0
        )

    def advantages(
        self, states: Sequence[Tensor], log_ratios: Sequence[Tensor], rewards: Sequence[float]
    ) -> list[Tensor]:
        """Return the advantage of every token, by the head before this batch; then fit the head.

        states: [B] of [T_i, hidden], the policy's before each trained token.
        log_ratios: [B] of [T_i] nats, target over behavior policy.
        rewards: [B], given at the last token.
        Returns: [B] of [T_i] float64.
        """
        features = torch.cat([each.detach().float() for each in states])
        values = self._head(features).squeeze(1)
        rows = torch.split(values.detach(), [len(each) for each in states])
        traces = [
            _trace(row.tolist(), ratios.tolist(), reward)
            for row, ratios, reward in zip(rows, log_ratios, rewards, strict=True)
        ]
        targets = values.new_tensor([target for trace in traces for target in trace.targets])
        self._optimizer.zero_grad()
        torch.autograd.backward(0.5 * (targets - values).square().mean())
        self._optimizer.step()
        return [torch.tensor(trace.advantages, dtype=torch.float64) for trace in traces]

    def state_dict(self) -> dict[str, Any]:
        """Return head and optimizer, for a checkpoint."""
        return {"head": self._head.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])


def _trace(values: Sequence[float], log_ratios: Sequence[float], reward: float) -> VTrace:
    rewards = [0.0] * (len(values) - 1) + [reward]
    return vtrace(log_ratios, rewards, values)
