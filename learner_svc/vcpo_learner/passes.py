"""The two passes of an update over its trajectories, one micro-batch in memory at a time.

Pass 1 scores every trajectory and, on demand, measures gradients. Pass 2 adds up the gradient of
sum_i k_i m_i, with m_i the mean log-probability of trajectory i's response tokens and k_i a number
that only the whole batch can give (see `decision`).

When one micro-batch holds all that pass 2 may need, its graph is kept and pass 2 is a backward pass
only. The rejected alternative never runs a forward pass twice: it keeps two gradient buffers, one
with rewards as coefficients and one without, and combines them when the baseline is known. That is
two more copies of the parameters in memory, and no per-trajectory coefficient beyond the reward.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vcpo.spec import VCPORunSpec
from vcpo.spec.workloads import Precision
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.batch import TokenBatch, micro_batches, num_tokens, token_batch
from vcpo_learner.gradient_norms import squared_gradient_norms
from vcpo_learner.module_calls import ModuleCall, recorded_calls
from vcpo_learner.scoring import mean_response_logprobs, response_logprobs, token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """A forward pass that a backward pass can still go through."""

    positions: Sequence[int]
    """Where its trajectories stand in the batch."""
    mean_logprobs: Tensor
    """[positions] nats per token."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Result of pass 1; sequences hold one entry per trajectory of the batch."""

    logprobs: Sequence[Sequence[float]]
    """Log-probability of each response token under the learner, nats."""
    squared_norms: Sequence[float]
    """||grad m_i||^2 where it was measured, else 0."""
    graph: Graph | None
    """Of all trajectories that pass 2 may use when one micro-batch held them, else None."""


class Passes:
    """Runs a model over trajectories; holds nothing from one update to the next."""

    def __init__(self, model: nn.Module, spec: VCPORunSpec, pad_token_id: int) -> None:
        self._model = model
        self._pad_token_id = pad_token_id
        self._device = next(model.parameters()).device
        self._temperature = spec.sampling.temperature
        self._micro_batch_size = spec.batch.micro_batch_trajectories
        self._use_bfloat16 = spec.learner.precision is Precision.BFLOAT16

    def score(
        self, trajectories: Sequence[Trajectory], trainable: Sequence[bool], *, with_norms: bool
    ) -> Scores:
        """Pass 1, over all trajectories.

        trainable: flags of those that pass 2 may use; norms are measured of these only.
        """
        chosen = [position for position, flag in enumerate(trainable) if flag]
        keep_graph = 0 < len(chosen) <= self._micro_batch_size
        differentiated = set(chosen) if with_norms or keep_graph else set()
        scored_only = [at for at in range(len(trajectories)) if at not in differentiated]

        logprobs: dict[int, list[float]] = {}
        for positions, batch in self._micro_batches(trajectories, scored_only):
            with torch.no_grad():
                rows = response_logprobs(self._token_logprobs(batch), batch)
            logprobs.update(zip(positions, rows, strict=True))

        squared_norms: dict[int, float] = {}
        graph = None
        for positions, batch in self._micro_batches(trajectories, sorted(differentiated)):
            rows, norms, means = self._differentiate(batch, with_norms, keep_graph)
            logprobs.update(zip(positions, rows, strict=True))
            squared_norms.update(zip(positions, norms, strict=True))
            graph = None if means is None else Graph(positions=positions, mean_logprobs=means)

        return Scores(
            logprobs=[logprobs[position] for position in range(len(trajectories))],
            squared_norms=[squared_norms.get(at, 0.0) for at in range(len(trajectories))],
            graph=graph,
        )

    def accumulate(
        self,
        trajectories: Sequence[Trajectory],
        coefficients: Sequence[float],
        graph: Graph | None,
    ) -> None:
        """Pass 2: add the gradient of sum_i k_i m_i to the parameters' `.grad`.

        coefficients: k_i; trajectories with k_i = 0 are left out.
        graph: as pass 1 returned it; it can be used once.
        """
        used = [position for position, value in enumerate(coefficients) if value != 0.0]
        for positions, means in self._means(trajectories, used, graph):
            weights = means.new_tensor([coefficients[position] for position in positions])
            torch.autograd.backward((weights * means).sum())

    def _differentiate(
        self, batch: TokenBatch, with_norms: bool, keep_graph: bool
    ) -> tuple[list[list[float]], list[float], Tensor | None]:
        """Log-probabilities, ||grad m_i||^2 or zeros, and m_i with its graph if it is to be kept.

        A function of its own, so that a graph is gone before the next micro-batch makes one.
        """
        recording: AbstractContextManager[list[ModuleCall]] = nullcontext([])
        if with_norms:
            recording = recorded_calls(self._model)
        with recording as calls:
            logprobs = self._token_logprobs(batch)
        means = mean_response_logprobs(logprobs, batch)
        norms = [0.0] * len(means)
        if with_norms:
            norms = squared_gradient_norms(
                self._model, means, calls, retain_graph=keep_graph
            ).tolist()
        return response_logprobs(logprobs, batch), norms, means if keep_graph else None

    def _means(
        self, trajectories: Sequence[Trajectory], used: Sequence[int], graph: Graph | None
    ) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Mean log-probabilities that can be differentiated, by micro-batch."""
        if graph is not None:
            row_of = {position: row for row, position in enumerate(graph.positions)}
            yield used, graph.mean_logprobs[[row_of[position] for position in used]]
            return
        for positions, batch in self._micro_batches(trajectories, used):
            yield positions, mean_response_logprobs(self._token_logprobs(batch), batch)

    def _micro_batches(
        self, trajectories: Sequence[Trajectory], positions: Sequence[int]
    ) -> Iterator[tuple[list[int], TokenBatch]]:
        lengths = [num_tokens(trajectories[position]) for position in positions]
        for part in micro_batches(lengths, self._micro_batch_size):
            chosen = [positions[index] for index in part]
            rows = [trajectories[position] for position in chosen]
            yield chosen, token_batch(rows, self._pad_token_id, self._device)

    def _token_logprobs(self, batch: TokenBatch) -> Tensor:
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._use_bfloat16):
            return token_logprobs(self._model, batch, temperature=self._temperature)
