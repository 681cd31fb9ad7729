"""What the record of a step says of its batch: ages of tokens, lengths, what is cut or equal."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

from vcpo.algo.health.diagnostics import percentile
from vcpo.wire.limits import MAX_REWARD_PARTS
from vcpo.wire.trajectory import FinishReason
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.update.batch_statistics import tokens_by_lag


def batch_fields(groups: Sequence[Lease], policy_version: int) -> dict[str, Any]:
    """Return the fields of `StepRecord` that describe a batch at a version."""
    lag = lag_statistics(groups, policy_version)
    lengths = [len(group.trajectories[0].prompt_token_ids) for group in groups]
    responses = list(chain.from_iterable(group.trajectories for group in groups))
    sampled = sorted(one.num_sampled_tokens for one in responses)
    parts = sorted({name for one in responses for name in one.reward_parts})[:MAX_REWARD_PARTS]
    return {
        "lag_mean": lag.mean,
        "lag_p50": lag.p50,
        "lag_max": lag.maximum,
        "cut_responses_ratio": fmean(one.finish_reason is FinishReason.LENGTH for one in responses),
        "equal_groups_ratio": fmean(
            len({one.reward for one in group.trajectories}) == 1 for group in groups
        ),
        "prompt_tokens_mean": fmean(lengths),
        "prompt_tokens_max": max(lengths),
        "response_tokens_p05": percentile(sampled, 5),
        "response_tokens_p50": percentile(sampled, 50),
        "response_tokens_p95": percentile(sampled, 95),
        "reward_parts": {
            name: fmean(one.reward_parts.get(name, 0.0) for one in responses) for name in parts
        },
    }


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
