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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vcpo.spec import VCPORunSpec
from vcpo.spec.workloads import Precision
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.batch import (
    TokenBatch,
    group_micro_batches,
    micro_batches,
    num_tokens,
    token_batch,
)
from vcpo_learner.combination import Combination
from vcpo_learner.estimator.record import TokenLogprobs
from vcpo_learner.module_calls import Recording, recorded_calls
from vcpo_learner.scoring import response_values, token_logprobs, weighted_logprobs
from vcpo_learner.trajectory_gradients import measure_gradients

LocalWeights = Callable[[TokenLogprobs], Tensor]
"""Weights a_it of some rows, from their log-probabilities; both [n, width]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """A forward pass that a backward pass can still go through."""

    positions: Sequence[int]
    """Where its trajectories stand in the batch."""
    logprobs: Tensor
    """[positions, width] nats."""
    mask: Tensor
    """[positions, width] bool; response tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """What a pass saw; sequences hold one entry per trajectory of the batch."""

    logprobs: Sequence[Sequence[float]]
    """Log-probability of each response token under the learner, nats."""
    squared_norms: Sequence[float]
    """||sum_t a_it grad log pi||^2 where it was measured, else 0."""
    graph: Graph | None = None
    """Of all trajectories that a second pass may use when one micro-batch held them, else None."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnePass:
    """What the pass in one needs to know beforehand: c_i = offset_i + slope of i's group."""

    offsets: Sequence[float]
    """[batch]; trajectories of groups without any other than 0 are scored only."""
    slope_of: Callable[[Sequence[int], Sequence[float], Sequence[Sequence[float]]], float] | None
    """From positions, squared norms and log-probabilities of a group; None for slopes of 0, and
    then no norm is measured."""


class Passes:
    """Runs a model over trajectories; holds nothing from one update to the next."""

    def __init__(self, model: nn.Module, spec: VCPORunSpec, pad_token_id: int) -> None:
        self._model = model
        self._pad_token_id = pad_token_id
        self._device = next(model.parameters()).device
        self.temperature = spec.sampling.temperature
        self._micro_batch_size = spec.batch.micro_batch_trajectories
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
        with self._recording(plan.slope_of is not None) as recording:
            tokens = self._token_logprobs(batch)
        objectives = weighted_logprobs(tokens, local_weights(_pairs(tokens, batch)))
        offsets = objectives.new_tensor([plan.offsets[at] for at in positions])
        rows = response_values(tokens, batch)
        if recording is None or plan.slope_of is None:
            torch.autograd.backward((objectives * offsets).sum())
            return dict(zip(positions, rows, strict=True)), {}
        group_of = [index for index, group in enumerate(groups) for _ in group]
        combination = Combination(offsets=offsets, groups=group_of)
        measured = measure_gradients(self._model, objectives, recording, combination)
        norms = measured.squared_norms.tolist()
        slopes, start = [], 0
        for group in groups:
            end = start + len(group)
            slopes.append(plan.slope_of(group, norms[start:end], rows[start:end]))
            start = end
        measured.add_to_parameters(slopes)
        return (
            dict(zip(positions, rows, strict=True)),
            dict(zip(positions, norms, strict=True)),
        )

    def _differentiable(
        self, batch: TokenBatch, local_weights: LocalWeights | None, keep_graph: bool
    ) -> tuple[Tensor, list[float]]:
        """Log-probabilities, with their graph if it is to be kept, and norms or zeros."""
        with self._recording(local_weights is not None) as recording:
            tokens = self._token_logprobs(batch)
        if recording is None or local_weights is None:
            return tokens, [0.0] * len(tokens)
        objectives = weighted_logprobs(tokens, local_weights(_pairs(tokens, batch)))
        measured = measure_gradients(self._model, objectives, recording, retain_graph=keep_graph)
        return tokens if keep_graph else tokens.detach(), measured.squared_norms.tolist()

    def _recording(self, is_wanted: bool) -> AbstractContextManager[Recording | None]:
        return recorded_calls(self._model) if is_wanted else nullcontext(None)

    def _part_batches(
        self, trajectories: Sequence[Trajectory], positions: Sequence[int]
    ) -> Iterator[tuple[list[int], TokenBatch]]:
        lengths = [num_tokens(trajectories[position]) for position in positions]
        for part in micro_batches(lengths, self._micro_batch_size):
            chosen = [positions[index] for index in part]
            yield chosen, self._batch(trajectories, chosen)

    def _batch(self, trajectories: Sequence[Trajectory], positions: Sequence[int]) -> TokenBatch:
        rows = [trajectories[position] for position in positions]
        return token_batch(rows, self._pad_token_id, self._device)

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
