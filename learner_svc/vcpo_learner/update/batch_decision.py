"""The decisions of one update, and what they and the people who watch a run see of its batch.

Every function sees the whole batch, so an update cannot depend on how it is split into
micro-batches. Decisions are made from a few plain numbers per trajectory.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from vcpo.algo.advantage import BaselineScope
from vcpo.algo.baseline import Baseline
from vcpo.algo.coverage import on_policy_mean_weight
from vcpo.algo.ess.calibration import MismatchCalibration
from vcpo.algo.ess.importance_weights import LARGEST_LOG_RATIO, WeightMoments
from vcpo.algo.ess.unit import EssKind, EssReading, EssUnit, ess_reading, ess_unit
from vcpo.algo.ess.verdict import StepLimits, StepVerdict, judge_step
from vcpo.algo.health.diagnostics import TokenSums, diagnose, lag_breakdown, signal_and_noise
from vcpo.algo.methods import KLPenalty, LossConfig
from vcpo.api.algorithm import Algorithm
from vcpo.wire.trajectory import Trajectory
from vcpo.wire.versions import step_of
from vcpo_learner.device import to_device
from vcpo_learner.estimator.record import BatchRecord, concatenate_rollout_logprobs, segment_sums
from vcpo_learner.update.result import BatchGradient, BatchSummary

_T = TypeVar("_T")


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
    limits: StepLimits,
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
        limits,
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


def batch_moments(batch: BatchSummary, log_ratios: Tensor, unit: EssUnit) -> WeightMoments:
    """Return the moments of a batch's weights, cut as `unit` says; log_ratios: [N] nats."""
    if unit.kind is EssKind.SEQUENCE:
        return WeightMoments.of(batch.log_weights)
    return block_moments(log_ratios, unit.blocks)


def diagnostics(batch: BatchGradient, config: LossConfig, gradient_norm: float) -> dict[str, Any]:
    """Return `BatchDiagnostics` by field; those about the gradient only if the norms are its own.

    gradient_norm: of the whole gradient before clipping, finite.
    """
    summary = batch.summary
    found = asdict(diagnose(summary.log_weights, batch.sums))
    squares = summary.squared_norms
    if any(squares) and config.has_sequence_terms:
        largest = math.log(config.largest_weight)
        weights = [min(each, largest) for each in summary.log_weights]
        found |= signal_and_noise(gradient_norm, squares, batch.advantages, weights)
    return found


def ess_by_lag(
    trajectories: Sequence[Trajectory], record: BatchRecord, policy_version: int
) -> dict[str, float]:
    """Return the ESS ratio of the trajectories in each bucket of lags, by its smallest lag.

    A trajectory's lag is the age of its oldest token, in steps.
    """
    log_weights: list[float] = record.sums(record.log_ratios).tolist()
    lags = (max(0, step_of(policy_version) - each.oldest_step) for each in trajectories)
    return {
        str(smallest): ratio
        for smallest, ratio in lag_breakdown(zip(lags, log_weights, strict=True)).items()
    }


def tokens_by_lag(trajectories: Iterable[Trajectory], policy_version: int) -> Counter[int]:
    """Return the number of sampled tokens of each lag, in steps."""
    tokens: Counter[int] = Counter()
    for trajectory in trajectories:
        for lag, num_tokens in trajectory.lags(policy_version):
            tokens[lag] += num_tokens
    return tokens


def rewards_by_worker(trajectories: Iterable[Trajectory]) -> dict[str, list[float]]:
    """Return the rewards by worker; under no name those of responses that several sampled."""
    rewards: dict[str, list[float]] = {}
    for trajectory in trajectories:
        rewards.setdefault(trajectory.worker_id or "", []).append(trajectory.reward)
    return rewards


def mean_surprisal(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the mean of -log mu over the trained tokens; None if it is not finite."""
    mean = float(concatenate_rollout_logprobs(trajectories).double().mean())
    return -mean if math.isfinite(mean) else None


def clamped_exp(exponent: float) -> float:
    """Return e to the exponent, at most the largest float."""
    largest = sys.float_info.max
    return math.exp(exponent) if exponent < math.log(largest) else largest


def token_sums(log_ratios: Tensor) -> TokenSums:
    """Return sums over all tokens; the twin in plain numbers is `TokenSums.of`.

    log_ratios: [N] float64 log pi - log mu, nats.
    """
    held = log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return TokenSums(
        weights=_moments(log_ratios),
        k3_sum=float((torch.expm1(held) - held).sum()),
    )


def block_moments(log_ratios: Tensor, blocks: Sequence[Sequence[int]]) -> WeightMoments:
    """Return the moments of the weights of all blocks.

    log_ratios: [N] float64 nats. blocks: [B][blocks] tokens of each block; those of a trajectory
        add up to it.
    """
    sizes = to_device(torch.tensor([*chain.from_iterable(blocks)], device="cpu"), log_ratios.device)
    return _moments(segment_sums(log_ratios, sizes))


def _moments(log_weights: Tensor) -> WeightMoments:
    return WeightMoments(
        count=len(log_weights),
        log_sum=float(log_weights.logsumexp(dim=0)),
        log_sum_squares=float((2.0 * log_weights).logsumexp(dim=0)),
    )
