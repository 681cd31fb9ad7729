"""What one update does with its batch, decided from a few numbers per trajectory.

Everything here sees the whole batch and no tensor, so that an update cannot depend on how its
trajectories were spread over micro-batches.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from vcpo.algo import (
    Baseline,
    BaselineScope,
    EssKind,
    EssReading,
    EssUnit,
    KLPenalty,
    LossConfig,
    MismatchCalibration,
    StepVerdict,
    WeightMoments,
    batch_advantages,
    ess_reading,
    ess_unit,
    judge_step,
)
from vcpo.spec.algorithm import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """What the decision needs to know of one trajectory."""

    reward: float
    """Finite; as the method shapes it."""
    num_tokens: int
    """Response tokens, at least 1."""
    log_weight: float
    """Log importance weight, nats, untruncated."""
    squared_gradient_norm: float
    """Of its contribution per unit of advantage; 0 when nothing asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether the optimizer steps, and at which part of the learning rate."""

    reading: EssReading
    """ESS ratio of the batch and on policy, at the kind in effect."""
    verdict: StepVerdict


MomentsOf = Callable[[EssUnit], WeightMoments]
"""Moments of the weights of a batch's pieces, cut as the unit says."""


def goes_in_one_pass(config: LossConfig, scope: BaselineScope) -> bool:
    """Whether a trajectory's coefficient is known as soon as its group was gone through."""
    return (
        config.has_fixed_shape
        and config.kl_penalty is KLPenalty.NONE
        and not config.is_whitened
        and scope is BaselineScope.GROUP
    )


def informative(
    rewards: Sequence[Sequence[float]], config: LossConfig, scope: BaselineScope
) -> list[bool]:
    """Which trajectories may have an advantage other than 0, known from rewards alone.

    rewards: [num_groups][n_g]. Returns one flag per trajectory, the groups one after another.
    Rewards that are equal wherever they share a baseline say nothing, whatever the gradients.
    """
    if config.kl_penalty is not KLPenalty.NONE or config.is_whitened or config.has_critic:
        return [True for group in rewards for _ in group]
    if config.baseline is Baseline.NONE:
        return [reward != 0.0 for reward in chain.from_iterable(rewards)]
    if scope is BaselineScope.BATCH:
        differ = _differ(chain.from_iterable(rewards))
        return [differ for group in rewards for _ in group]
    return list(chain.from_iterable([_differ(group)] * len(group) for group in rewards))


def decide(
    batch: Sequence[ScoredTrajectory],
    algorithm: Algorithm,
    calibration: MismatchCalibration,
    moments_of: MomentsOf,
    *,
    kl_per_token: float | None = None,
) -> Decision:
    """What becomes of the step, by all of the batch.

    The ESS is read from untruncated weights of the whole batch.
    calibration: with the fresh tokens of this step seen.
    kl_per_token: from sampler to learner, nats; None when it is not known.
    Raises: NonFiniteWeightError when a weight is not a number, or every weight is 0.
    Source: VCPO, arXiv 2602.17616, Eq. 5.
    """
    unit = unit_of(batch, algorithm, calibration)
    reading = ess_reading(unit, moments_of(unit), relative_error=calibration.relative_error)
    verdict = judge_step(
        reading.ess_ratio,
        reading.on_policy_ess_ratio,
        algorithm.step_limits,
        chance_nats=reading.chance_nats,
        kl_per_token=kl_per_token,
    )
    return Decision(reading=reading, verdict=verdict)


def on_policy_ess_ratio(
    num_tokens: Sequence[int], algorithm: Algorithm, calibration: MismatchCalibration
) -> float:
    """ESS ratio of whole trajectories on policy: as the spec gives it, else calibrated."""
    given = algorithm.on_policy_ess_ratio
    return calibration.on_policy_ess_ratio(num_tokens) if given is None else given


def unit_of(
    batch: Sequence[ScoredTrajectory], algorithm: Algorithm, calibration: MismatchCalibration
) -> EssUnit:
    """At which length the ESS of a batch is read; a ratio given is one of whole trajectories."""
    lengths = [scored.num_tokens for scored in batch]
    given = algorithm.on_policy_ess_ratio
    if given is not None:
        whole = ess_unit(EssKind.SEQUENCE, lengths, None)
        return replace(whole, on_policy_ess_ratio=given)
    norms = own_norms(batch, algorithm.loss_config.largest_weight)
    kind = algorithm.ess_kind
    if kind is EssKind.ENERGY and not any(norms):
        kind = EssKind.SEQUENCE
    return ess_unit(kind, lengths, calibration.variance_per_token, gradient_norms=norms)


def own_norms(batch: Sequence[ScoredTrajectory], cap: float) -> list[float]:
    """Norms of the gradients without their weights min(w, cap), [B]; 0 at a weight of 0."""
    return [
        math.sqrt(scored.squared_gradient_norm) * math.exp(-min(scored.log_weight, math.log(cap)))
        if scored.squared_gradient_norm > 0.0
        else 0.0
        for scored in batch
    ]


def trajectory_advantages(
    groups: Sequence[Sequence[ScoredTrajectory]], algorithm: Algorithm
) -> tuple[float, ...]:
    """Reward minus baseline of each trajectory, the groups one after another.

    Raises: NonFiniteWeightError when a norm is not a number.
    Source: VCPO, arXiv 2602.17616, Eq. 7.
    """
    by_group = batch_advantages(
        [[scored.reward for scored in group] for group in groups],
        algorithm.loss_config.baseline,
        algorithm.baseline_scope,
        squared_norms=[[scored.squared_gradient_norm for scored in group] for group in groups],
        log_weights=[[scored.log_weight for scored in group] for group in groups],
    )
    return tuple(chain.from_iterable(by_group))


def _differ(rewards: Iterable[float]) -> bool:
    return len(set(rewards)) > 1
