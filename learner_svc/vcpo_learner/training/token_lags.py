"""Ages of a batch's tokens, in policy versions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vcpo_learner.ledger.groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class LagStatistics:
    """Statistics over the response tokens of a batch, in policy versions."""

    mean: float
    p50: int
    maximum: int


def lag_statistics(groups: Sequence[Group], policy_version: int) -> LagStatistics:
    """Return the ages of all response tokens of a batch at `policy_version`."""
    tokens: Counter[int] = Counter()
    for group in groups:
        for trajectory in group.trajectories:
            for lag, num_tokens in trajectory.lags(policy_version):
                tokens[lag] += num_tokens
    total = tokens.total()
    middle, seen, p50 = (total + 1) // 2, 0, 0
    for lag in sorted(tokens):
        seen += tokens[lag]
        if seen >= middle:
            p50 = lag
            break
    mean = sum(lag * count for lag, count in tokens.items()) / total
    return LagStatistics(mean=mean, p50=p50, maximum=max(tokens))
