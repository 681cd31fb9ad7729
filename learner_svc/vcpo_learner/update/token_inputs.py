"""What a few methods ask of every token beside its log-probability; each costs a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from vcpo.algo import LossConfig
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.estimator.record import TokenInput, inputs_needed
from vcpo_learner.forward.logprobs import (
    prefix_states,
    response_values,
    token_entropies,
    token_logprobs,
)
from vcpo_learner.forward.token_batch import TokenBatch
from vcpo_learner.update.critic import Critic
from vcpo_learner.update.micro_batch_passes import Passes


class TokenInputs:
    """Entropies, log-probabilities of the first policy, and a critic's advantages, on demand.

    The reference of TBA and AGRO is the policy as it is when this is made, before any checkpoint is
    loaded into it: the one that training began with. It is a second copy in memory.
    """

    def __init__(self, model: nn.Module, config: LossConfig, passes: Passes) -> None:
        self._model = model
        self._passes = passes
        self._needed = inputs_needed(config)
        self._reference: nn.Module | None = None
        self._critic: Critic | None = None
        if TokenInput.REFERENCE_LOGPROB in self._needed:
            self._reference = deepcopy(model).requires_grad_(False)
        if TokenInput.ADVANTAGE in self._needed:
            device = next(model.parameters()).device
            self._critic = Critic(_hidden_size(model), device)

    def of(
        self,
        trajectories: Sequence[Trajectory],
        learner_logprobs: Sequence[Sequence[float]],
        rewards: Sequence[float],
    ) -> dict[TokenInput, list[list[float]]]:
        """What the config needs of a batch, [B][sampled tokens] each; a critic learns from it."""
        found: dict[TokenInput, list[list[float]]] = {}
        if TokenInput.ENTROPY in self._needed:
            found[TokenInput.ENTROPY] = self._rows(trajectories, token_entropies, self._model)
        if self._reference is not None:
            found[TokenInput.REFERENCE_LOGPROB] = self._rows(
                trajectories, token_logprobs, self._reference
            )
        if self._critic is not None:
            ratios = [
                [pi - mu for pi, mu in zip(row, each.rollout_logprobs, strict=True)]
                for each, row in zip(trajectories, learner_logprobs, strict=True)
            ]
            states = self._states(trajectories)
            found[TokenInput.ADVANTAGE] = self._critic.advantages(states, ratios, rewards)
        return found

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of it."""
        return {} if self._critic is None else {"critic": self._critic.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; a critic that was not there begins anew."""
        if self._critic is not None and "critic" in state:
            self._critic.load_state_dict(state["critic"])

    def _rows(
        self,
        trajectories: Sequence[Trajectory],
        values_of: Callable[..., Tensor],
        model: nn.Module,
    ) -> list[list[float]]:
        rows: dict[int, list[float]] = {}
        for positions, batch in self._passes.micro_batches(trajectories):
            with torch.no_grad(), self._passes.autocast():
                values = values_of(model, batch, temperature=self._passes.temperature)
            rows.update(zip(positions, response_values(values, batch), strict=True))
        return [rows[position] for position in range(len(trajectories))]

    def _states(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        rows: dict[int, Tensor] = {}
        for positions, batch in self._passes.micro_batches(trajectories):
            with torch.no_grad(), self._passes.autocast():
                states = prefix_states(self._model, batch)
            rows.update(zip(positions, _of_responses(states, batch), strict=True))
        return [rows[position] for position in range(len(trajectories))]


def _of_responses(states: Tensor, batch: TokenBatch) -> list[Tensor]:
    return [row[mask] for row, mask in zip(states, batch.response_mask, strict=True)]


def _hidden_size(model: nn.Module) -> int:
    head: Any = model
    size: int = head.config.hidden_size
    return size
