"""A batch as the ESS and those who watch a run see it: moments, diagnostics, and ages."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from vcpo.algo.ess.importance_weights import LARGEST_LOG_RATIO
from vcpo.algo.ess.moments import WeightMoments
from vcpo.algo.ess.unit import EssKind, EssUnit
from vcpo.algo.health.diagnostics import TokenSums, diagnose
from vcpo.algo.health.lag_breakdown import lag_breakdown
from vcpo.algo.methods import LossConfig
from vcpo.wire.trajectory import Trajectory
from vcpo.wire.versions import step_of
from vcpo_learner.device import to_device
from vcpo_learner.estimator.record import BatchRecord, concatenate_rollout_logprobs, segment_sums
from vcpo_learner.update.batch_decision import BatchSummary, split_groups
from vcpo_learner.update.result import BatchGradient


def batch_moments(batch: BatchSummary, log_ratios: Tensor, unit: EssUnit) -> WeightMoments:
    """Return the moments of a batch's weights, cut as `unit` says; log_ratios: [N] nats."""
    if unit.kind is EssKind.SEQUENCE:
        return WeightMoments.of(batch.log_weights)
    return block_moments(log_ratios, unit.blocks)


def diagnostics(batch: BatchGradient, config: LossConfig) -> dict[str, Any]:
    """Return `BatchDiagnostics` by field; those about norms are None if none were measured."""
    norms = list(map(math.sqrt, batch.summary.squared_norms))
    found = diagnose(
        batch.summary.log_weights,
        batch.sums,
        split_groups(batch.advantages, batch.summary.group_sizes),
        cap=config.largest_weight,
        gradient_norms=norms if any(norms) else None,
        coefficients=batch.advantages,
    )
    return asdict(found)


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


def rewards_of(trajectories: Iterable[Trajectory]) -> list[float]:
    """Return the rewards."""
    return [trajectory.reward for trajectory in trajectories]


def response_tokens_mean(trajectories: Sequence[Trajectory]) -> float:
    """Return the mean number of sampled tokens."""
    return fmean(trajectory.num_sampled_tokens for trajectory in trajectories)


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
    """Return the moments of the weights of all blocks; the twin is `block_log_weights`.

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
