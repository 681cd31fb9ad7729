"""A batch as the ESS and those who watch a run see it: moments, diagnostics, and ages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from torch import Tensor

from vcpo.algo import (
    EssKind,
    EssUnit,
    LaggedTrajectory,
    LossConfig,
    TokenSums,
    WeightMoments,
    diagnose,
    lag_breakdown,
    log_norms,
)
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.update.batch_decision import ScoredTrajectory, own_norms
from vcpo_learner.update.token_statistics import block_moments


def moments_of_batch(
    batch: Sequence[ScoredTrajectory],
    log_ratios: Sequence[Tensor],
    cap: float,
    unit: EssUnit,
) -> WeightMoments:
    """Moments of the weights of a batch's pieces, cut as `unit` says; with norms for `energy`."""
    match unit.kind:
        case EssKind.SEQUENCE:
            return WeightMoments.of([each.log_weight for each in batch])
        case EssKind.ENERGY:
            norms = log_norms(own_norms(batch, cap))
            return WeightMoments.of(
                [each.log_weight + norm for each, norm in zip(batch, norms, strict=True)]
            )
    return block_moments(log_ratios, unit.blocks)


def diagnostics(
    groups: Sequence[Sequence[ScoredTrajectory]],
    advantages: Sequence[float],
    sums: TokenSums,
    config: LossConfig,
) -> dict[str, Any]:
    """Return `BatchDiagnostics` by field; those about norms are None where none were measured.

    advantages: [B], the groups one after another.
    """
    batch = list(chain.from_iterable(groups))
    norms = [math.sqrt(each.squared_gradient_norm) for each in batch]
    by_trajectory = iter(advantages)
    found = diagnose(
        [each.log_weight for each in batch],
        sums,
        [[next(by_trajectory) for _ in group] for group in groups],
        cap=config.largest_weight,
        gradient_norms=norms if any(norms) else None,
        coefficients=advantages,
    )
    return asdict(found)


def ess_by_lag(
    trajectories: Sequence[Trajectory], log_ratios: Sequence[Tensor], policy_version: int
) -> dict[str, float]:
    """Return the ESS ratio of the trajectories in each bucket of lags, by its smallest lag.

    A trajectory's lag is the age of its oldest token, in policy versions.
    """
    buckets = lag_breakdown(
        [
            LaggedTrajectory(
                lag=max(lag for lag, _ in trajectory.lags(policy_version)),
                log_weight=float(ratios.sum()),
                num_tokens=len(ratios),
                absolute_log_ratio=float(ratios.abs().sum()),
            )
            for trajectory, ratios in zip(trajectories, log_ratios, strict=True)
        ]
    )
    return {str(each.smallest_lag): each.ess / each.count for each in buckets}
