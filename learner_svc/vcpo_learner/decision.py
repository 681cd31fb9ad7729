"""What one update does with its batch, decided from a few numbers per trajectory.

Everything here sees the whole batch and no tensor, so that an update cannot depend on how its
trajectories were spread over micro-batches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from vcpo.algo import (
    Baseline,
    BaselineScope,
    MismatchCalibration,
    batch_advantages,
    ess_ratio,
    learning_rate_scale,
    truncated_weight,
)
from vcpo.spec.algorithm import Algorithm

NORM_BASELINES = frozenset({Baseline.OPOB, Baseline.PUBLISHED})
"""Baselines that weigh trajectories by the norm of their gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """What the decision needs to know of one trajectory."""

    reward: float
    """Finite."""
    num_tokens: int
    """Response tokens, at least 1."""
    log_weight: float
    """Log importance weight, nats, untruncated."""
    squared_gradient_norm: float
    """Of the mean log-probability of its tokens, without its weight; 0 when nothing asks for it."""
    is_fresh: bool
    """Whether every token was sampled by the very policy that is being updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One update, before any gradient is taken. Sequences hold the groups one after another."""

    log_weights: tuple[float, ...]
    """Nats, untruncated."""
    advantages: tuple[float, ...]
    coefficients: tuple[float, ...]
    """What the mean log-probability of each trajectory is multiplied by in the loss."""
    ess_ratio: float
    on_policy_ess_ratio: float
    learning_rate_scale: float
    calibration: MismatchCalibration
    """The one given, with this batch's fresh trajectories observed."""


def informative(rewards: Sequence[Sequence[float]], algorithm: Algorithm) -> list[bool]:
    """Which trajectories may have an advantage other than 0, known from rewards alone.

    rewards: [num_groups][n_g]. Returns one flag per trajectory, the groups one after another.
    Rewards that are equal wherever they share a baseline say nothing, whatever the gradients.
    """
    if algorithm.baseline is Baseline.NONE:
        return [reward != 0.0 for reward in chain.from_iterable(rewards)]
    if algorithm.baseline_scope is BaselineScope.BATCH:
        differ = _differ(chain.from_iterable(rewards))
        return [differ for group in rewards for _ in group]
    return list(chain.from_iterable([_differ(group)] * len(group) for group in rewards))


def decide(
    groups: Sequence[Sequence[ScoredTrajectory]],
    algorithm: Algorithm,
    calibration: MismatchCalibration,
) -> Decision:
    """Advantages, loss coefficients and learning rate scale of one update.

    The loss is sum_i k_i m_i with m_i the mean log-probability of trajectory i's tokens and
    k_i = -A_i min(w_i, c) / B. The ESS is read from untruncated weights of the whole batch.
    Raises: NonFiniteWeightError when a weight or a norm is not a number, or every weight is 0.
    Source: VCPO, arXiv 2602.17616, Eq. 5 and 7.
    """
    batch = list(chain.from_iterable(groups))
    log_weights = tuple(scored.log_weight for scored in batch)
    ratio = ess_ratio(log_weights)
    calibration = _observed(calibration, batch)
    lengths = [scored.num_tokens for scored in batch]
    on_policy_ratio = on_policy_ess_ratio(lengths, algorithm, calibration)
    advantages = _advantages(groups, algorithm)
    return Decision(
        log_weights=log_weights,
        advantages=advantages,
        coefficients=tuple(
            -advantage * _weight(scored, algorithm) / len(batch)
            for advantage, scored in zip(advantages, batch, strict=True)
        ),
        ess_ratio=ratio,
        on_policy_ess_ratio=on_policy_ratio,
        learning_rate_scale=learning_rate_scale(
            ratio, on_policy_ratio, algorithm.learning_rate_rule
        ),
        calibration=calibration,
    )


def on_policy_ess_ratio(
    num_tokens: Sequence[int], algorithm: Algorithm, calibration: MismatchCalibration
) -> float:
    """ESS ratio of an on-policy batch with these lengths: as the spec gives it, else calibrated."""
    given = algorithm.on_policy_ess_ratio
    return calibration.on_policy_ess_ratio(num_tokens) if given is None else given


def _advantages(
    groups: Sequence[Sequence[ScoredTrajectory]], algorithm: Algorithm
) -> tuple[float, ...]:
    by_group = batch_advantages(
        [[scored.reward for scored in group] for group in groups],
        algorithm.baseline,
        algorithm.baseline_scope,
        [[_squared_norm(scored, algorithm) for scored in group] for group in groups],
        [[scored.log_weight for scored in group] for group in groups],
    )
    return tuple(chain.from_iterable(by_group))


def _observed(
    calibration: MismatchCalibration, batch: Sequence[ScoredTrajectory]
) -> MismatchCalibration:
    fresh = [scored for scored in batch if scored.is_fresh]
    return calibration.observe(
        [scored.log_weight for scored in fresh], [scored.num_tokens for scored in fresh]
    )


def _weight(scored: ScoredTrajectory, algorithm: Algorithm) -> float:
    return truncated_weight(scored.log_weight, algorithm.importance_weight_cap)


def _squared_norm(scored: ScoredTrajectory, algorithm: Algorithm) -> float:
    """Of the contribution as the estimator uses it: the truncated weight is in it once.

    A weight of 0 comes from a token that the learner rules out, whose gradient is not a number.
    """
    weight = _weight(scored, algorithm)
    return weight**2 * scored.squared_gradient_norm if weight > 0.0 else 0.0


def _differ(rewards: Iterable[float]) -> bool:
    return len(set(rewards)) > 1
