r"""Baselines of groups, shrunk toward the one of their batch by how noisy they are.

The optimal baseline b_g of one prompt's group fits its difficulty and is estimated from few
trajectories. The one of the batch, B, is estimated from many and fits no prompt. If prompts differ
with variance tau^2, and b_g misses its prompt's value with variance v_g, the linear mix

    B + s_g (b_g - B),        s_g = tau^2 / (tau^2 + v_g),

misses it least (empirical Bayes). Both variances are estimated from the batch itself. With
p_gi = n_gi / sum_j n_gj, the share of a trajectory in its group, and q_g, that of a group in the
batch:

    m_g     = 1 / sum_i p_gi^2                                      effective size of the group
    sigma^2 = sum_gi p_gi (R_gi - b_g)^2 / sum_g (1 - 1/m_g)        within groups
    v_g     = sigma^2 / m_g
    tau^2   = (sum_g q_g (b_g - B)^2 - sum_g q_g (1 - q_g) v_g) / sum_g q_g (1 - q_g), at least 0

because the expected squares within and between groups are sigma^2 (1 - 1/m_g) and
q_g (1 - q_g) (tau^2 + v_g). Groups count by q_g, since a baseline that is off by d costs
d^2 sum_i n_gi of variance. sigma^2 is one number for all groups: a group of equal rewards shows no
spread, and is not the less noisy for it.

Sources: method of moments as in DerSimonian and Laird, "Meta-analysis in clinical trials" (1986),
with weights q_g; mixing as in Efron and Morris, "Data analysis using Stein's estimator" (1975).
Applied to baselines by this project.
"""

import math
from collections.abc import Sequence

from vcpo.algo.arrays import Matrix, matrix
from vcpo.algo.baseline import optimal_baseline


def shrunk_baselines(groups: Matrix, squared_norms: Matrix) -> list[float]:
    """Return one baseline for each group, between its own and the one of the batch.

    groups: [num_groups][n_g] raw rewards, finite.
    squared_norms: the shape of groups; n_i >= 0 as for `optimal_baseline`.
    Returns: [num_groups] values in [min R, max R] of the batch; the batch's own where nothing shows
    that prompts differ, such as in one group, and exactly R if all rewards are R.
    Raises: as `optimal_baseline`; ValueError if there is no group or the shapes differ.
    """
    groups, squared_norms = matrix(groups, "groups"), matrix(squared_norms, "squared_norms")
    rows = list(zip(groups, squared_norms, strict=True))
    own = [optimal_baseline(rewards, norms) for rewards, norms in rows]
    largest = max(max(norms) for norms in squared_norms)
    # Without any norm the gradient is 0; all trajectories count alike, as in `optimal_baseline`.
    masses = [math.fsum(norm / largest if largest else 1.0 for norm in norms) for _, norms in rows]
    whole = optimal_baseline(own, masses)
    kept = _kept_parts(rows, own, masses, whole)
    return [whole + part * (each - whole) for part, each in zip(kept, own, strict=True)]


def _kept_parts(
    rows: Sequence[tuple[Sequence[float], Sequence[float]]],
    own: Sequence[float],
    masses: Sequence[float],
    whole: float,
) -> list[float]:
    """Return s_g of each group, in [0, 1]; 0 if the batch does not show the variances.

    rows: rewards and squared norms of each group. own, whole: b_g and B. masses: proportional to
        q_g.
    """
    shares = [_shares(norms) for _, norms in rows]
    sizes_inverse = [math.fsum(share * share for share in each) for each in shares]
    freedom = math.fsum(1.0 - inverse for inverse in sizes_inverse)
    parts = _shares(masses)
    between = math.fsum(part * (1.0 - part) for part in parts)
    if freedom <= 0.0 or between <= 0.0:
        return [0.0] * len(rows)
    spread = math.fsum(
        share * (reward - baseline) ** 2
        for (rewards, _), each, baseline in zip(rows, shares, own, strict=True)
        for reward, share in zip(rewards, each, strict=True)
    )
    noises = [spread / freedom * inverse for inverse in sizes_inverse]
    seen = math.fsum(part * (each - whole) ** 2 for part, each in zip(parts, own, strict=True))
    by_chance = math.fsum(
        part * (1.0 - part) * noise for part, noise in zip(parts, noises, strict=True)
    )
    variance = max(0.0, seen - by_chance) / between
    return [variance / (variance + noise) if variance > 0.0 else 0.0 for noise in noises]


def _shares(norms: Sequence[float]) -> list[float]:
    """Return the parts of a sum that its terms have; equal ones if all terms are 0."""
    largest = max(norms)
    if largest == 0.0:
        return [1.0 / len(norms)] * len(norms)
    scaled = [norm / largest for norm in norms]
    total = math.fsum(scaled)
    return [each / total for each in scaled]
