"""What the journal keeps of a step: the update's part of it, and the ages of its tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vcpo_learner.ledger.groups import Group
from vcpo_learner.update.result import UpdateResult


@dataclass(frozen=True, slots=True, kw_only=True)
class LagStatistics:
    """Ages of a batch's tokens, in policy versions."""

    mean: float
    p50: int
    maximum: int


def recorded(result: UpdateResult) -> dict[str, Any]:
    """Fields of a `StepRecord` that say what the update did."""
    return {
        "reward_mean": result.reward_mean,
        "response_tokens_mean": result.response_tokens_mean,
        "ess_ratio": result.ess_ratio,
        "on_policy_ess_ratio": result.on_policy_ess_ratio,
        "ess_kind": result.ess_kind,
        "calibration_age_steps": result.calibration_age_steps,
        "importance_weight_max": result.importance_weight_max,
        "learning_rate_scale": result.learning_rate_scale,
        "learning_rate": result.learning_rate,
        "gradient_norm": result.gradient_norm,
        "baseline_shift": result.baseline_shift,
        "masked_share": result.masked_share,
        "warning_level": result.warning_level,
        "warning_score": result.warning_score,
        "diagnostics": {} if result.diagnostics is None else asdict(result.diagnostics),
        "ess_by_lag": {str(each.smallest_lag): each.ess / each.count for each in result.lags},
        "skipped": result.skipped,
    }


def lag_statistics(groups: Sequence[Group], policy_version: int) -> LagStatistics:
    """Ages of all response tokens of a batch at `policy_version`, each token counted once."""
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
