"""Ages of a batch's tokens, in policy versions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from vcpo_learner.ledger.lease import Lease
from vcpo_learner.update.batch_statistics import tokens_by_lag


@dataclass(frozen=True, slots=True, kw_only=True)
class LagStatistics:
    """Statistics over the response tokens of a batch, in policy versions."""

    mean: float
    p50: int
    maximum: int


def lag_statistics(groups: Sequence[Lease], policy_version: int) -> LagStatistics:
    """Return the ages of all response tokens of a batch at `policy_version`."""
    trajectories = chain.from_iterable(group.trajectories for group in groups)
    tokens = tokens_by_lag(trajectories, policy_version)
    total = tokens.total()
    middle, seen, p50 = (total + 1) // 2, 0, 0
    for lag in sorted(tokens):
        seen += tokens[lag]
        if seen >= middle:
            p50 = lag
            break
    mean = sum(lag * count for lag, count in tokens.items()) / total
    return LagStatistics(mean=mean, p50=p50, maximum=max(tokens))
