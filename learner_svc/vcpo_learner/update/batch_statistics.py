"""A batch as the ESS and those who watch a run see it: moments, diagnostics, and ages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from vcpo.algo import (
    BatchDiagnostics,
    EssKind,
    EssUnit,
    LagBucket,
    LaggedTrajectory,
    Recipe,
    TokenSums,
    WeightMoments,
    diagnose,
    lag_breakdown,
    log_norms,
)
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.update.batch_decision import ScoredTrajectory, own_norms
from vcpo_learner.update.token_statistics import piece_moments


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
    return piece_moments(log_ratios, unit.pieces)


def diagnosed(
    groups: Sequence[Sequence[ScoredTrajectory]],
    advantages: Sequence[float],
    sums: TokenSums,
    recipe: Recipe,
) -> BatchDiagnostics:
    """Numbers of one batch to look at; those about norms where norms were measured.

    advantages: [B], the groups one after another.
    """
    batch = list(chain.from_iterable(groups))
    norms = [math.sqrt(each.squared_gradient_norm) for each in batch]
    by_trajectory = iter(advantages)
    return diagnose(
        [each.log_weight for each in batch],
        sums,
        [[next(by_trajectory) for _ in group] for group in groups],
        cap=recipe.largest_weight,
        gradient_norms=norms if any(norms) else None,
        coefficients=advantages,
    )


def by_lag(
    trajectories: Sequence[Trajectory], log_ratios: Sequence[Tensor], policy_version: int
) -> tuple[LagBucket, ...]:
    """A batch by the age of each trajectory's oldest token, freshest first."""
    return lag_breakdown(
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
