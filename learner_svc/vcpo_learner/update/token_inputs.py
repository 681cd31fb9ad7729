"""What a few losses need of every token beside its log-probabilities; each costs a forward pass."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from vcpo.algo.advantage import vtrace
from vcpo.algo.methods import LossConfig
from vcpo_learner.estimator.record import BatchRecord, TokenInput, inputs_needed
from vcpo_learner.forward.forward_pass import prefix_states, token_entropies
from vcpo_learner.forward.token_batch import BatchTokens
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.ranks.sharding import is_sharded, local_part, release
from vcpo_learner.update.micro_batches import MicroBatchRunner


class TokenInputs:
    """Entropies, log-probabilities under the reference policy, and a critic's advantages.

    The reference policy of TBA and AGRO is the model as it is when this object is made, before any
    checkpoint is loaded into it: the policy that training began with.
    """

    def __init__(self, config: LossConfig, runner: MicroBatchRunner, ranks: Ranks) -> None:
        self._ranks = ranks
        self._network = runner.network
        self._runner = runner
        self._needed = inputs_needed(config)
        self._reference: ReferencePolicy | None = None
        self._critic: Critic | None = None
        if TokenInput.REFERENCE_LOGPROB in self._needed:
            self._reference = ReferencePolicy(runner.network)
        if TokenInput.ADVANTAGE in self._needed:
            self._critic = Critic(self._hidden_size, runner.device)

    def add_to(
        self, record: BatchRecord, tokens: BatchTokens, rewards: Sequence[float]
    ) -> BatchRecord:
        """Return a scored record with what the loss needs; a critic learns from it.

        rewards: [B] as the loss defines them.
        """
        if TokenInput.ENTROPY in self._needed:
            record = replace(record, entropies=self._entropies(record, tokens))
        if self._reference is not None:
            with self._reference.in_place():
                logprobs = self._logprobs(record, tokens)
            record = replace(record, reference_logprobs=logprobs)
        if self._critic is not None:
            states = self._states(record, tokens)
            log_ratios = torch.split(record.log_ratios, list(record.num_tokens))
            advantages = self._critic.advantages(states, log_ratios, rewards)
            record = replace(record, advantages=torch.cat(advantages).to(record.rewards))
        return record

    def state_dict(self) -> dict[str, Any]:
        return {} if self._critic is None else {"critic": self._critic.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._critic is not None and "critic" in state:
            self._critic.load_state_dict(state["critic"])

    @property
    def _hidden_size(self) -> int:
        config: Any = self._network.model.config
        size: int = config.hidden_size
        return size

    @torch.no_grad()
    def _entropies(self, record: BatchRecord, tokens: BatchTokens) -> Tensor:
        entropies = torch.zeros_like(record.learner_logprobs)
        for step in self._runner.split(tokens, range(len(record.num_tokens))):
            with self._runner.autocast():
                values = token_entropies(
                    self._network, step.batch, temperature=self._runner.temperature
                )
            record.write(entropies, step.positions, step.select_trained(values))
        return self._ranks.share(entropies)

    @torch.no_grad()
    def _logprobs(self, record: BatchRecord, tokens: BatchTokens) -> Tensor:
        logprobs = torch.zeros_like(record.learner_logprobs)
        for step in self._runner.split(tokens, range(len(record.num_tokens))):
            values = self._runner.logprobs(step.batch)
            record.write(logprobs, step.positions, step.select_trained(values))
        return self._ranks.share(logprobs)

    @torch.no_grad()
    def _states(self, record: BatchRecord, tokens: BatchTokens) -> list[Tensor]:
        """The policy's states before each trained token, [B] of [T_i, hidden]."""
        total, hidden = len(record.rollout_logprobs), self._hidden_size
        states = torch.zeros(total, hidden, device=self._runner.device)
        for step in self._runner.split(tokens, range(len(record.num_tokens))):
            with self._runner.autocast():
                values = prefix_states(self._network, step.batch)
            record.write(states, step.positions, step.select_trained(values).float())
        return list(torch.split(self._ranks.share(states), list(record.num_tokens)))


LEARNING_RATE: Final = 1e-3
"""Learning rate of AdamW; the inputs have unit size, as they come from a normalization."""


class Critic:
    """Predicts values, computes advantages by V-trace, and fits the values. Owner: the update.

    It is linear in the policy's last hidden states, which it does not change, and takes one step
    per batch.
    """

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
            vtrace(ratios.tolist(), [0.0] * (len(row) - 1) + [reward], row.tolist())
            for row, ratios, reward in zip(rows, log_ratios, rewards, strict=True)
        ]
        targets = values.new_tensor([target for trace in traces for target in trace.targets])
        self._optimizer.zero_grad()
        torch.autograd.backward(0.5 * (targets - values).square().mean())
        self._optimizer.step()
        return [torch.tensor(trace.advantages, dtype=torch.float64) for trace in traces]

    def state_dict(self) -> dict[str, Any]:
        return {"head": self._head.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])


class ReferencePolicy:
    """A copy of a model's trainable parameters, with which the model can compute for a while.

    The copy takes as much memory as the parameters: on each rank, its shards of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        release(model)
        self._copies = [local_part(each.detach()).clone() for each in self._parameters()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchange the model's parameters for those of the reference until the block ends."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        release(self._model)
        for at, parameter in enumerate(self._parameters()):
            copy = self._copies[at]
            if is_sharded(parameter):
                # FSDP knows the shard by its memory.
                part = local_part(parameter.detach())
                own = part.clone()
                part.copy_(copy)
                copy.copy_(own)
            else:
                # A graph that waits for its backward pass must not see a write.
                self._copies[at], parameter.data = parameter.data, copy

    def _parameters(self) -> list[nn.Parameter]:
        return [each for each in self._model.parameters() if each.requires_grad]
