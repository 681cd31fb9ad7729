"""Baselines that studies compare, by the door of `algorithm.baseline`.

Those that are shrunk need all groups of a batch, so `baselineScope: batch`.
"""

import math
from collections.abc import Sequence
from statistics import pstdev
from typing import Final

from vcpo.algo.baseline import mean_baseline, optimal_baseline

_SMALLEST_DEVIATION: Final = 1e-8

GROUP_SIZE: Final = 8
"""`batch.trajectoriesPerPrompt` of the studies: the size of the groups that are shrunk."""


def published_baseline(
    rewards: Sequence[float], squared_norms: Sequence[float], log_weights: Sequence[float]
) -> float:
    """Return the baseline of VCPO's released code, which counts the weight twice.

    b = sum_i w_i^2 n_i R_i / sum_i w_i^2 n_i, where n_i already contains the truncated weight; in
    log space, so that nothing overflows. The mean reward if every product is 0.
    Source: mit-han-lab/vcpo, compute_opob_baseline with use_is_weights (the default).
    """
    log_terms = [
        2.0 * log_weight + math.log(squared_norm) if squared_norm > 0.0 else -math.inf
        for log_weight, squared_norm in zip(log_weights, squared_norms, strict=True)
    ]
    largest = max(log_terms)
    if largest == -math.inf:
        return mean_baseline(rewards)
    return optimal_baseline(rewards, [math.exp(log_term - largest) for log_term in log_terms])


def published(
    rewards: Sequence[float], squared_norms: Sequence[float], log_weights: Sequence[float]
) -> list[float]:
    """Return the advantages over `published_baseline`."""
    baseline = published_baseline(rewards, squared_norms, log_weights)
    return [reward - baseline for reward in rewards]


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


def opob_leave_one_out(rewards: Sequence[float], squared_norms: Sequence[float]) -> list[float]:
    """Return each reward minus the optimal baseline of the others; at least two are needed."""
    return [
        reward
        - optimal_baseline(
            [*rewards[:index], *rewards[index + 1 :]],
            [*squared_norms[:index], *squared_norms[index + 1 :]],
        )
        for index, reward in enumerate(rewards)
    ]


def shrunk_opob(rewards: Sequence[float], squared_norms: Sequence[float]) -> list[float]:
    """Return rewards minus their group's baseline, shrunk toward the batch's.

    rewards, squared_norms: [n] of a batch, in groups of `GROUP_SIZE`.
    """
    return shrunk_pessimistic(rewards, squared_norms, 1.0)


def shrunk_pessimistic(
    rewards: Sequence[float], squared_norms: Sequence[float], coverage: float
) -> list[float]:
    """Return as `shrunk_opob`, with baselines lowered toward the least reward of the batch."""
    groups = _groups(rewards)
    own = shrunk_baselines(groups, _groups(squared_norms))
    least = min(rewards)
    lowered = [least + coverage * (each - least) for each in own]
    return [
        reward - baseline
        for group, baseline in zip(groups, lowered, strict=True)
        for reward in group
    ]


def shrunk_baselines(
    groups: Sequence[Sequence[float]], squared_norms: Sequence[Sequence[float]]
) -> list[float]:
    r"""Return one baseline for each group, between its own and the one of the batch.

    A group's own baseline b_g is estimated from few trajectories, the batch's B fits no prompt. If
    prompts differ with variance tau^2, and b_g is off by v_g, the linear mix B + s_g (b_g - B) with
    s_g = tau^2 / (tau^2 + v_g) is off least. With p_gi = n_gi / sum_j n_gj and q_g, the share of a
    group in the batch's norms:

        sigma^2 = sum_gi p_gi (R_gi - b_g)^2 / sum_g (1 - sum_i p_gi^2)
        v_g     = sigma^2 sum_i p_gi^2
        tau^2   = (sum_g q_g (b_g - B)^2 - sum_g q_g (1 - q_g) v_g) / sum_g q_g (1 - q_g), >= 0

    Sources: DerSimonian and Laird, "Meta-analysis in clinical trials" (1986); Efron and Morris,
    "Data analysis using Stein's estimator" (1975).
    """
    rows = list(zip(groups, squared_norms, strict=True))
    own = [optimal_baseline(*row) for row in rows]
    parts = _shares([math.fsum(norms) for norms in squared_norms])
    whole = optimal_baseline(own, parts)
    shares = [_shares(norms) for norms in squared_norms]
    inverse_sizes = [math.fsum(share * share for share in each) for each in shares]
    freedom = math.fsum(1.0 - inverse for inverse in inverse_sizes)
    between = math.fsum(part * (1.0 - part) for part in parts)
    if freedom <= 0.0 or between <= 0.0:
        return [whole for _ in groups]
    spread = math.fsum(
        share * (reward - baseline) ** 2
        for rewards, each, baseline in zip(groups, shares, own, strict=True)
        for reward, share in zip(rewards, each, strict=True)
    )
    noises = [spread / freedom * inverse for inverse in inverse_sizes]
    seen = math.fsum(part * (each - whole) ** 2 for part, each in zip(parts, own, strict=True))
    chance = math.fsum(part * (1.0 - part) * v for part, v in zip(parts, noises, strict=True))
    variance = max(0.0, seen - chance) / between
    kept = [variance / (variance + noise) if variance > 0.0 else 0.0 for noise in noises]
    return [whole + part * (each - whole) for part, each in zip(kept, own, strict=True)]


def _groups(values: Sequence[float]) -> list[Sequence[float]]:
    return [values[at : at + GROUP_SIZE] for at in range(0, len(values), GROUP_SIZE)]


def _shares(values: Sequence[float]) -> list[float]:
    total = math.fsum(values)
    return [value / total if total else 1.0 / len(values) for value in values]
