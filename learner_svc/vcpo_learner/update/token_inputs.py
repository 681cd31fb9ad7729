"""What a few losses need of every token beside its log-probabilities; each costs a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vcpo.algo import LossConfig
from vcpo_learner.estimator.record import BatchRecord, TokenInput, inputs_needed
from vcpo_learner.forward.logprobs import prefix_states, token_entropies, token_logprobs
from vcpo_learner.forward.token_batch import BatchTokens
from vcpo_learner.update.critic import Critic
from vcpo_learner.update.micro_batches import MicroBatchRunner


class TokenInputs:
    """Entropies, log-probabilities under the reference policy, and a critic's advantages.

    The reference policy of TBA and AGRO is the model as it is when this object is made, before any
    checkpoint is loaded into it: the policy that training began with. It is a second copy in
    memory.
    """

    def __init__(self, model: nn.Module, config: LossConfig, runner: MicroBatchRunner) -> None:
        self._network = runner.network
        self._runner = runner
        self._needed = inputs_needed(config)
        self._reference: nn.Module | None = None
        self._critic: Critic | None = None
        if TokenInput.REFERENCE_LOGPROB in self._needed:
            self._reference = deepcopy(runner.network).requires_grad_(False)
        if TokenInput.ADVANTAGE in self._needed:
            self._critic = Critic(_hidden_size(model), runner.device)

    def add_to(
        self, record: BatchRecord, tokens: BatchTokens, rewards: Sequence[float]
    ) -> BatchRecord:
        """Return a scored record with what the loss needs; a critic learns from it.

        rewards: [B] as the loss defines them.
        """
        if TokenInput.ENTROPY in self._needed:
            record = replace(record, entropies=self._entropies(record, tokens))
        if self._reference is not None:
            logprobs = self._reference_logprobs(self._reference, record, tokens)
            record = replace(record, reference_logprobs=logprobs)
        if self._critic is not None:
            log_ratios = torch.split(record.log_ratios, list(record.num_tokens))
            advantages = self._critic.advantages(self._states(tokens), log_ratios, rewards)
            record = replace(record, advantages=torch.cat(advantages).to(record.rewards))
        return record

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of it."""
        return {} if self._critic is None else {"critic": self._critic.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; a critic that the state lacks starts new."""
        if self._critic is not None and "critic" in state:
            self._critic.load_state_dict(state["critic"])

    @torch.no_grad()
    def _entropies(self, record: BatchRecord, tokens: BatchTokens) -> Tensor:
        entropies = torch.empty_like(record.learner_logprobs)
        for step in self._runner.split(tokens, range(len(record.num_tokens))):
            with self._runner.autocast():
                values = token_entropies(
                    self._network, step.batch, temperature=self._runner.temperature
                )
            record.write(entropies, step.positions, step.select_trained(values))
        return entropies

    @torch.no_grad()
    def _reference_logprobs(
        self, reference: nn.Module, record: BatchRecord, tokens: BatchTokens
    ) -> Tensor:
        logprobs = torch.empty_like(record.learner_logprobs)
        for step in self._runner.split(tokens, range(len(record.num_tokens))):
            with self._runner.autocast():
                values = token_logprobs(reference, step.batch, temperature=self._runner.temperature)
            record.write(logprobs, step.positions, step.select_trained(values))
        return logprobs

    @torch.no_grad()
    def _states(self, tokens: BatchTokens) -> list[Tensor]:
        """The policy's states before each trained token, [B] of [T_i, hidden]."""
        rows: dict[int, Tensor] = {}
        for step in self._runner.split(tokens, range(len(tokens.token_ids))):
            with self._runner.autocast():
                states = step.select_trained(prefix_states(self._network, step.batch))
            lengths: list[int] = step.batch.response_mask.sum(dim=1).tolist()
            rows.update(zip(step.positions, torch.split(states, lengths), strict=True))
        return [rows[position] for position in range(len(rows))]


def _hidden_size(model: nn.Module) -> int:
    head: Any = model
    size: int = head.config.hidden_size
    return size
