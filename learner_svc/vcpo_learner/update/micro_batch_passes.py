r"""The passes of an update over its trajectories, one micro-batch in memory at a time.

The step's gradient is sum_{i,t} k_it grad log pi(y_it). Two ways lead to it:

    in one     where k_it = c_i a_it with a_it the trajectory's own weights and c_i known from its
               group: micro-batches hold whole groups, each is gone through forward and backward
               once, and c_i is found in between (`trajectory_gradients`).
    in two     where k_it depends on the whole batch: score everything, with norms on demand;
               decide; add up the gradient. When one micro-batch holds all that is trained on, its
               graph is kept, and the second pass is a backward pass only.

The rejected alternative for the second kind keeps two gradient buffers, one with rewards as
coefficients and one without: two more copies of the parameters, and no coefficient per token.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain

import torch
from torch import Tensor, nn

from vcpo.algo import GradientNormEstimator
from vcpo.spec import VCPORunSpec
from vcpo.spec.algorithm import RowLayout
from vcpo.spec.workloads import Precision
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.estimator.record import TokenLogprobs
from vcpo_learner.forward.forward_pass import ForwardPass, forward_pass
from vcpo_learner.forward.logprobs import response_values, token_logprobs, weighted_logprobs
from vcpo_learner.forward.packed_rows import require_kept_apart
from vcpo_learner.forward.token_batch import (
    TokenBatch,
    group_micro_batches,
    micro_batches,
    num_tokens,
    token_batch,
)
from vcpo_learner.per_sample_gradients.weighted_sum import Combination, relative_offsets
from vcpo_learner.update.scores import Graph, LocalWeights, OnePass, Scores

_FROM_GRADIENTS = (GradientNormEstimator.EXACT, GradientNormEstimator.LM_HEAD)
"""Estimators that need a backward pass."""


class Passes:
    """Runs a model over trajectories; holds nothing from one update to the next."""

    def __init__(self, model: nn.Module, spec: VCPORunSpec, pad_token_id: int) -> None:
        self._model = model
        self._pad_token_id = pad_token_id
        self._device = next(model.parameters()).device
        self.temperature = spec.sampling.temperature
        self._micro_batch_size = spec.batch.micro_batch_trajectories
        self._estimator = spec.algorithm.gradient_norms
        self._packs = spec.batch.row_layout is RowLayout.PACKED
        if self._packs:
            require_kept_apart(model)
        self._use_bfloat16 = spec.learner.precision is Precision.BFLOAT16

    def micro_batches(
        self, trajectories: Sequence[Trajectory]
    ) -> Iterator[tuple[list[int], TokenBatch]]:
        """All trajectories by micro-batch: their positions, and their tokens on the device."""
        return self._part_batches(trajectories, range(len(trajectories)))

    def autocast(self) -> AbstractContextManager[object]:
        """The number type that the run computes in."""
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._use_bfloat16)

    def in_one(
        self,
        groups: Sequence[Sequence[Trajectory]],
        trained: Sequence[bool],
        local_weights: LocalWeights,
        plan: OnePass,
    ) -> Scores:
        """Score everything and add the gradient of sum_i c_i f_i to the parameters' `.grad`.

        trained: [num_groups] flags; the other groups are scored without a gradient.
        """
        trajectories = [each for group in groups for each in group]
        members = _members(groups)
        idle = [
            at for group, flag in zip(members, trained, strict=True) if not flag for at in group
        ]
        logprobs = self._scored(trajectories, idle)
        squared_norms: dict[int, float] = {}
        chosen = [group for group, flag in zip(members, trained, strict=True) if flag]
        lengths = [[num_tokens(trajectories[at]) for at in group] for group in chosen]
        for run in group_micro_batches(lengths, self._micro_batch_size):
            part = [chosen[index] for index in run]
            rows, norms = self._one_micro_batch(trajectories, part, local_weights, plan)
            logprobs.update(rows)
            squared_norms.update(norms)
        return _scores(logprobs, squared_norms, len(trajectories))

    def score(
        self,
        trajectories: Sequence[Trajectory],
        trained: Sequence[bool],
        local_weights: LocalWeights | None,
    ) -> Scores:
        """First of two passes, over all trajectories.

        trained: flags of those that the second pass may use.
        local_weights: for norms of those; None measures none.
        """
        chosen = [position for position, flag in enumerate(trained) if flag]
        keep_graph = 0 < len(chosen) <= self._micro_batch_size
        differentiated = set(chosen) if local_weights is not None or keep_graph else set()
        idle = [at for at in range(len(trajectories)) if at not in differentiated]
        logprobs = self._scored(trajectories, idle)
        squared_norms: dict[int, float] = {}
        graph = None
        for positions, batch in self._part_batches(trajectories, sorted(differentiated)):
            tokens, norms = self._differentiable(batch, local_weights, keep_graph)
            logprobs.update(zip(positions, response_values(tokens, batch), strict=True))
            squared_norms.update(zip(positions, norms, strict=True))
            if keep_graph:
                graph = Graph(positions=positions, logprobs=tokens, mask=batch.response_mask)
        return _scores(logprobs, squared_norms, len(trajectories), graph)

    def accumulate(
        self,
        trajectories: Sequence[Trajectory],
        coefficients: Sequence[Sequence[float]],
        graph: Graph | None,
    ) -> None:
        """Second pass: add the gradient of sum_it k_it log pi(y_it) to the parameters' `.grad`.

        coefficients: k_it [batch][response tokens]; trajectories with zeros only are left out.
        graph: as the first pass returned it; it can be used once.
        """
        used = [position for position, row in enumerate(coefficients) if any(row)]
        if graph is not None:
            _backward(graph.logprobs, graph.mask, [coefficients[at] for at in graph.positions])
            return
        for positions, batch in self._part_batches(trajectories, used):
            rows = [coefficients[position] for position in positions]
            _backward(self._token_logprobs(batch), batch.response_mask, rows)

    def _scored(
        self, trajectories: Sequence[Trajectory], positions: Sequence[int]
    ) -> dict[int, list[float]]:
        logprobs: dict[int, list[float]] = {}
        for part, batch in self._part_batches(trajectories, positions):
            with torch.no_grad():
                rows = response_values(self._token_logprobs(batch), batch)
            logprobs.update(zip(part, rows, strict=True))
        return logprobs

    def _one_micro_batch(
        self,
        trajectories: Sequence[Trajectory],
        groups: Sequence[Sequence[int]],
        local_weights: LocalWeights,
        plan: OnePass,
    ) -> tuple[Mapping[int, list[float]], Mapping[int, float]]:
        """Forward and backward over whole groups; log-probabilities and norms by position."""
        positions = [at for group in groups for at in group]
        batch = self._batch(trajectories, positions)
        forward = self._forward(batch, None if plan.slope_of is None else self._estimator)
        tokens = forward.logprobs
        weights = local_weights(_pairs(tokens, batch))
        offsets = [[plan.offsets[at] for at in group] for group in groups]
        if plan.slope_of is not None:
            squares = iter(weights.square().sum(dim=1).tolist())
            offsets = [relative_offsets(each, [next(squares) for _ in each]) for each in offsets]
        combination = Combination(
            offsets=tokens.new_tensor(list(chain.from_iterable(offsets)), dtype=torch.float64),
            groups=[index for index, group in enumerate(groups) for _ in group],
        )
        measured = forward.measured(weights, combination)
        norms = dict(zip(positions, measured.squared_norms.tolist(), strict=True))
        rows = dict(zip(positions, response_values(tokens, batch), strict=True))
        slopes = [0.0] * len(groups)
        if plan.slope_of is not None:
            slopes = [
                plan.slope_of(group, own, [norms[at] for at in group], [rows[at] for at in group])
                for group, own in zip(groups, offsets, strict=True)
            ]
        measured.add_to_parameters(slopes)
        return rows, norms

    def _differentiable(
        self, batch: TokenBatch, local_weights: LocalWeights | None, keep_graph: bool
    ) -> tuple[Tensor, list[float]]:
        """Log-probabilities, with their graph if it is to be kept, and norms or zeros."""
        estimator = None if local_weights is None else self._estimator
        with torch.set_grad_enabled(keep_graph or estimator in _FROM_GRADIENTS):
            forward = self._forward(batch, estimator)
            tokens = forward.logprobs
            if local_weights is None:
                return tokens, [0.0] * len(tokens)
            weights = local_weights(_pairs(tokens, batch))
            norms = forward.measured(weights, retain_graph=keep_graph).squared_norms
        return tokens if keep_graph else tokens.detach(), norms.tolist()

    def _forward(self, batch: TokenBatch, estimator: GradientNormEstimator | None) -> ForwardPass:
        with self.autocast():
            return forward_pass(self._model, batch, estimator, temperature=self.temperature)

    def _part_batches(
        self, trajectories: Sequence[Trajectory], positions: Sequence[int]
    ) -> Iterator[tuple[list[int], TokenBatch]]:
        lengths = [num_tokens(trajectories[position]) for position in positions]
        for part in micro_batches(lengths, self._micro_batch_size):
            chosen = [positions[index] for index in part]
            yield chosen, self._batch(trajectories, chosen)

    def _batch(self, trajectories: Sequence[Trajectory], positions: Sequence[int]) -> TokenBatch:
        rows = [trajectories[position] for position in positions]
        return token_batch(rows, self._pad_token_id, self._device, packs=self._packs)

    def _token_logprobs(self, batch: TokenBatch) -> Tensor:
        with self.autocast():
            return token_logprobs(self._model, batch, temperature=self.temperature)


def _members(groups: Sequence[Sequence[Trajectory]]) -> list[list[int]]:
    """Positions of each group's trajectories in the batch."""
    members, start = [], 0
    for group in groups:
        members.append(list(range(start, start + len(group))))
        start += len(group)
    return members


def _scores(
    logprobs: Mapping[int, list[float]],
    squared_norms: Mapping[int, float],
    count: int,
    graph: Graph | None = None,
) -> Scores:
    return Scores(
        logprobs=[logprobs[position] for position in range(count)],
        squared_norms=[squared_norms.get(position, 0.0) for position in range(count)],
        graph=graph,
    )


def _pairs(tokens: Tensor, batch: TokenBatch) -> TokenLogprobs:
    return TokenLogprobs(
        learner=tokens.detach().double(), rollout=batch.rollout_logprobs, mask=batch.response_mask
    )


def _backward(logprobs: Tensor, mask: Tensor, coefficients: Sequence[Sequence[float]]) -> None:
    weights = torch.zeros_like(logprobs)
    flat = [value for row in coefficients for value in row]
    weights[mask] = weights.new_tensor(flat)
    torch.autograd.backward(weighted_logprobs(logprobs, weights).sum())
