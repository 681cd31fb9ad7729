"""The decisions of one update, from a few plain numbers per trajectory.

Every function sees the whole batch and no tensor, so an update cannot depend on how the batch is
split into micro-batches.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TypeVar

from vcpo.algo.advantage import BaselineScope
from vcpo.algo.baseline import Baseline
from vcpo.algo.coverage import on_policy_mean_weight
from vcpo.algo.ess.calibration import MismatchCalibration
from vcpo.algo.ess.moments import WeightMoments
from vcpo.algo.ess.unit import EssKind, EssReading, EssUnit, ess_reading, ess_unit
from vcpo.algo.ess.verdict import StepVerdict, judge_step
from vcpo.algo.methods import KLPenalty, LossConfig
from vcpo.api.algorithm import Algorithm

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """What the decision needs to know of a batch; [B] numbers, the groups one after another."""

    group_sizes: Sequence[int]
    """[num_groups]"""
    num_tokens: Sequence[int]
    """Trained tokens of each trajectory, at least 1."""
    rewards: Sequence[float]
    """Finite; the rewards that the baseline is computed from."""
    log_weights: Sequence[float]
    """Log importance weights, nats, untruncated."""
    squared_norms: Sequence[float]
    """Squared norm of each trajectory's contribution to the gradient, for an advantage of 1; 0 if
    it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """Whether the optimizer steps, and at which part of the learning rate."""

    reading: EssReading
    """ESS ratio of the batch and on policy, at the kind in effect."""
    verdict: StepVerdict


def may_have_advantage(rewards: Sequence[Sequence[float]], config: LossConfig) -> list[bool]:
    """Return which trajectories may have an advantage other than 0, known from rewards alone.

    If all rewards that share a baseline are equal, every advantage is 0, whatever the gradients.
    rewards: [num_groups][n_g]. Returns one flag per trajectory, the groups one after another.
    """
    has_other_terms = config.kl_penalty is not KLPenalty.NONE or config.has_critic
    if has_other_terms or config.is_whitened or not config.is_shipped:
        return [True for group in rewards for _ in group]
    if config.baseline is Baseline.NONE:
        return [reward != 0.0 for reward in chain.from_iterable(rewards)]
    if config.baseline_scope is not BaselineScope.GROUP:
        differ = _differ(chain.from_iterable(rewards))
        return [differ for group in rewards for _ in group]
    return list(chain.from_iterable([_differ(group)] * len(group) for group in rewards))


def decide_step(
    unit: EssUnit,
    moments: WeightMoments,
    algorithm: Algorithm,
    *,
    relative_error: float = 0.0,
    kl_per_token: float | None = None,
) -> StepDecision:
    """Decide whether the step is taken, and at which part of the learning rate.

    unit: as `batch_ess_unit` returns it.
    moments: of the untruncated weights of the whole batch, cut as the unit says.
    relative_error: of the calibration, with the fresh tokens of this step.
    kl_per_token: from behavior to target policy, nats; None if it is not known.
    Raises: NonFiniteWeightError if every weight is 0.
    Source: VCPO, arXiv 2602.17616, Eq. 5.
    """
    reading = ess_reading(unit, moments, relative_error=relative_error)
    verdict = judge_step(
        reading.ess_ratio,
        reading.on_policy_ess_ratio,
        algorithm.step_limits,
        chance_nats=reading.chance_nats,
        kl_per_token=kl_per_token,
    )
    return StepDecision(reading=reading, verdict=verdict)


def on_policy_ess_ratio(
    num_tokens: Sequence[int], algorithm: Algorithm, calibration: MismatchCalibration
) -> float:
    """ESS ratio of whole trajectories on policy: as the spec gives it, else calibrated."""
    given = algorithm.on_policy_ess_ratio
    return calibration.on_policy_ess_ratio(num_tokens) if given is None else given


def on_policy_weight(
    num_tokens: Sequence[int], algorithm: Algorithm, calibration: MismatchCalibration
) -> float:
    """Mean truncated weight of a batch on policy, in (0, 1], as the mismatch alone leaves it.

    num_tokens: [B] trained tokens of each trajectory. An on-policy ratio given by the spec is one
    of whole trajectories; without a calibration there is no mismatch.
    """
    given, per_token = algorithm.on_policy_ess_ratio, calibration.variance_per_token
    if given is not None:
        variances = [-math.log(given)]
    else:
        variances = [(per_token or 0.0) * length for length in num_tokens]
    return on_policy_mean_weight(variances, algorithm.loss_config.largest_weight)


def batch_ess_unit(
    batch: BatchSummary, algorithm: Algorithm, calibration: MismatchCalibration
) -> EssUnit:
    """Return the length at which the ESS of a batch is read.

    An on-policy ratio given by the spec is one of whole trajectories.
    """
    given = algorithm.on_policy_ess_ratio
    if given is not None:
        whole = ess_unit(EssKind.SEQUENCE, batch.num_tokens, None)
        return replace(whole, on_policy_ess_ratio=given)
    return ess_unit(algorithm.ess_kind, batch.num_tokens, calibration.variance_per_token)


def split_groups(values: Sequence[_T], sizes: Sequence[int]) -> list[list[_T]]:
    """Return values [B] by group, [num_groups][n_g]; sizes: [num_groups]."""
    ends = accumulate(sizes)
    return [list(values[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def _differ(rewards: Iterable[float]) -> bool:
    return len(set(rewards)) > 1
