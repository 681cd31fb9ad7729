"""How a batch's gradient comes about: in one pass over it, or scored first and then summed.

Both ways give the same numbers where both are open; which one is taken follows from the config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from vcpo.algo import (
    Baseline,
    NonFiniteWeightError,
    advantages,
    log_importance_weight,
    optimal_baseline,
    published_baseline,
)
from vcpo.spec import VCPORunSpec
from vcpo.spec.algorithm import NORM_BASELINES
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.estimator.coefficients import token_coefficients
from vcpo_learner.estimator.record import BatchRecord, batch_record, batch_size
from vcpo_learner.estimator.shaping import overlong_penalty, regularized_rewards
from vcpo_learner.estimator.weights import local_weights
from vcpo_learner.update.batch_decision import goes_in_one_pass, informative
from vcpo_learner.update.micro_batch_passes import Passes
from vcpo_learner.update.scores import LocalWeights, OnePass, Scores
from vcpo_learner.update.token_inputs import TokenInputs

Groups = Sequence[Sequence[Trajectory]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredBatch:
    """A batch as the first pass left it."""

    groups: Groups
    scores: Scores
    rewards: Sequence[float]
    """[B]; what the baseline is taken of."""
    log_weights: Sequence[float]
    """[B] nats, untruncated."""
    record: BatchRecord | None
    """None when the gradient is gathered already."""


class GradientGathering:
    """Finds the gradient of a batch under the run's method; the model's `.grad` holds it then."""

    def __init__(self, model: nn.Module, spec: VCPORunSpec, pad_token_id: int) -> None:
        self._scope = spec.algorithm.baseline_scope
        self._loss_config = spec.algorithm.loss_config
        self._longest_answer = spec.sampling.max_new_tokens
        self._passes = Passes(model, spec, pad_token_id)
        self._inputs = TokenInputs(model, self._loss_config, self._passes)
        self._largest_group = (
            spec.batch.micro_batch_trajectories
            if goes_in_one_pass(self._loss_config, self._scope)
            else 0
        )

    def score(self, groups: Groups, policy_version: int) -> ScoredBatch:
        """Score a batch, and gather its gradient already where each group decides for itself.

        That takes whole groups in memory; larger ones than a micro-batch are gone through twice.

        Raises: NonFiniteWeightError when a weight or a norm is not a number.
        """
        trajectories = list(chain.from_iterable(groups))
        rewards = [self._reward(each) for each in trajectories]
        size = batch_size(trajectories, self._longest_answer)
        local = partial(local_weights, config=self._loss_config, size=size)
        flags = informative(_as_groups(rewards, groups), self._loss_config, self._scope)
        if max(map(len, groups)) <= self._largest_group:
            scores = self._gathered(groups, rewards, flags, local)
            record = None
        else:
            wants_norms = self._loss_config.baseline in NORM_BASELINES
            scores = self._passes.score(trajectories, flags, local if wants_norms else None)
            record = batch_record(
                trajectories,
                scores.logprobs,
                policy_version=policy_version,
                size=size,
                extras=self._inputs.of(trajectories, scores.logprobs, rewards),
            )
            rewards = regularized_rewards(rewards, record, self._loss_config).tolist()
        return ScoredBatch(
            groups=groups,
            scores=scores,
            rewards=rewards,
            log_weights=log_weights(trajectories, scores.logprobs),
            record=record,
        )

    def logprobs(self, trajectories: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        """Log-probability of each sampled token under the learner, nats, without any gradient."""
        return self._passes.score(trajectories, [False] * len(trajectories), None).logprobs

    def gather(self, batch: ScoredBatch, advantages_of_batch: Sequence[float]) -> float:
        """Complete the gradient; returns the share of tokens that the gate left nothing of.

        Raises: NonFiniteWeightError when a coefficient is not a number.
        """
        if batch.record is None:
            return 0.0
        found = token_coefficients(batch.record, advantages_of_batch, self._loss_config)
        lengths: list[int] = batch.record.logprobs.lengths.tolist()
        padded = found.values.tolist()
        rows = [row[:length] for row, length in zip(padded, lengths, strict=True)]
        trajectories = list(chain.from_iterable(batch.groups))
        self._passes.accumulate(trajectories, rows, batch.scores.graph)
        return found.masked_share

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of it."""
        return self._inputs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._inputs.load_state_dict(state)

    def _reward(self, trajectory: Trajectory) -> float:
        num_tokens = trajectory.num_sampled_tokens
        penalty = overlong_penalty(
            num_tokens, self._longest_answer, self._loss_config.overlong_share
        )
        return trajectory.reward - penalty

    def _gathered(
        self, groups: Groups, rewards: Sequence[float], flags: Sequence[bool], local: LocalWeights
    ) -> Scores:
        """Both passes in one; equal rewards cost no backward pass."""
        trained = [any(group) for group in _as_groups(flags, groups)]
        if self._loss_config.baseline in NORM_BASELINES:
            trajectories = list(chain.from_iterable(groups))
            slope_of = partial(_baseline, self._loss_config.baseline, trajectories)
            plan = OnePass(offsets=[-reward for reward in rewards], slope_of=slope_of)
        else:
            by_group = [
                advantages(group, self._loss_config.baseline) if is_trained else [0.0] * len(group)
                for group, is_trained in zip(_as_groups(rewards, groups), trained, strict=True)
            ]
            offsets = [-each for each in chain.from_iterable(by_group)]
            plan = OnePass(offsets=offsets, slope_of=None)
        return self._passes.in_one(groups, trained, local, plan)


def log_weights(
    trajectories: Sequence[Trajectory], logprobs: Sequence[Sequence[float]]
) -> list[float]:
    """Log importance weight of each trajectory, nats, untruncated.

    Raises: NonFiniteWeightError, naming the trajectory, at a weight that is not a number.
    """
    rows = zip(trajectories, logprobs, strict=True)
    return [_log_weight(trajectory, row) for trajectory, row in rows]


def _log_weight(trajectory: Trajectory, learner_logprobs: Sequence[float]) -> float:
    try:
        return log_importance_weight(learner_logprobs, trajectory.rollout_logprobs)
    except NonFiniteWeightError as error:
        name = f"{error.name} of trajectory {trajectory.trajectory_id!r}"
        raise NonFiniteWeightError(name, error.index, error.value) from error


def _baseline(
    baseline: Baseline,
    trajectories: Sequence[Trajectory],
    positions: Sequence[int],
    offsets: Sequence[float],
    squared_norms: Sequence[float],
    logprobs: Sequence[Sequence[float]],
) -> float:
    """Baseline of one group, whose trajectories stand at `positions`; offsets: rewards, negated."""
    weights = log_weights([trajectories[at] for at in positions], logprobs)
    rewards = [-offset for offset in offsets]
    if baseline is Baseline.PUBLISHED:
        return published_baseline(rewards, squared_norms, weights)
    return optimal_baseline(rewards, squared_norms)


def _as_groups(flat: Sequence[float], groups: Groups) -> list[list[float]]:
    values = iter(flat)
    return [[next(values) for _ in group] for group in groups]
