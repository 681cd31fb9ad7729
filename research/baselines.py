"""Baselines of other groups that a study compares, by the door of `algorithm.baseline`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import pstdev
from typing import Final

from vcpo.algo.baseline import published_baseline

_SMALLEST_DEVIATION: Final = 1e-8


def released_opob(
    rewards: Sequence[float],
    squared_norms: Sequence[float],
    log_weights: Sequence[float],
    num_tokens: Sequence[int],
) -> list[float]:
    """Return the advantages of a group as VCPO's released scripts have them.

    A_i = (R_i - b) / std R, b = sum_i w_i^2 T_i^2 n_i R_i / sum_i w_i^2 T_i^2 n_i. The norm n_i is
    of the mean over T_i tokens and has the truncated weight already, so the weight counts twice.
    Source: mit-han-lab/vcpo, its scripts' `use_is_weights`, `norm_by_std` and
    `normalize_by_length` off.
    """
    of_sums = [norm * tokens**2 for norm, tokens in zip(squared_norms, num_tokens, strict=True)]
    baseline = published_baseline(rewards, of_sums, log_weights)
    deviation = pstdev(rewards)
    scale = 1.0 / deviation if deviation > _SMALLEST_DEVIATION else 1.0
    return [(reward - baseline) * scale for reward in rewards]
