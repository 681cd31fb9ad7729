r"""Advantages: the signed weight with which each trajectory enters the policy gradient.

An advantage is a reward minus a baseline (see `baseline`). GRPO divides it by the standard
deviation of the group's rewards. A trajectory has one advantage, which all of its tokens share.

Every method with a baseline keeps one rule: if all rewards that share a baseline are equal, each
advantage is exactly 0.0: AdamW would divide a remainder by its own size.

Sources: VCPO, arXiv 2602.17616, Eq. 7; GRPO, arXiv 2402.03300; RLOO, arXiv 2402.14740.

Departures: GRPO implementations add 1e-6 to the standard deviation, and many take the sample's.
This module takes the population's, as the VCPO release does, and adds nothing. RLOO refuses a group
of one trajectory; other implementations return its raw reward.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import chain, repeat
from types import MappingProxyType
from typing import Final

from vcpo.algo.arrays import Matrix, Scalar, Vector, matrix, vector
from vcpo.algo.baseline import (
    Baseline,
    mean_baseline,
    optimal_baseline,
    pessimistic_baseline,
    require_rewards,
)
from vcpo.algo.ess.importance_weights import NonFiniteWeightError, require_log_weights


class BaselineScope(StrEnum):
    """Which trajectories a baseline is computed from."""

    GROUP = "group"
    """The responses to the prompt."""
    BATCH = "batch"
    """All responses of the batch, which share one baseline."""


BATCH_BASELINES: Final = (Baseline.OPOB, Baseline.PESSIMISTIC, Baseline.GROUP_MEAN)
"""Shipped baselines that can be computed from all responses of a batch."""


SHARED_NUMBERS: Final = ("rewards", "num_tokens", "log_weights", "squared_norms", "coverage")
"""Numbers of the trajectories that share a baseline, by the names of a baseline's parameters."""

AdvantageFunction = Callable[..., Sequence[float]]
"""A baseline: from those of `SHARED_NUMBERS` that its parameters name to the advantages, [n]."""


def advantages(
    rewards: Vector,
    baseline: Baseline | AdvantageFunction,
    squared_norms: Vector | None = None,
    log_weights: Vector | None = None,
    coverage: Scalar = 1.0,
    num_tokens: Vector | None = None,
) -> list[float]:
    """Return the advantages of trajectories that share one baseline, in their order.

    | baseline        | A_i                                    | needs                           |
    |-----------------|----------------------------------------|---------------------------------|
    | opob            | R_i - b*                               | squared_norms                   |
    | pessimistic     | R_i - b* + (1 - C) (b* - min R)        | squared_norms, coverage C       |
    | groupMean       | R_i - mean R                           |                                 |
    | rloo            | R_i - mean of the others' R            | two trajectories                |
    | grpo            | (R_i - mean R) / population std R;     |                                 |
    |                 | 0 if std is 0                          |                                 |
    | none            | R_i                                    |                                 |

    baseline: a row of `BASELINES`, or a function of the same kind.
    rewards: [n] raw rewards, finite.
    squared_norms: [n] as for `optimal_baseline`. log_weights: [n] nats, untruncated.
    coverage: as for `pessimistic_baseline`.
    num_tokens: [n] trained tokens.
    Equal rewards give exactly 0.0, except under `none`, which has no baseline: A_i is R_i.
    Sources: VCPO, arXiv 2602.17616, Eq. 7; GRPO, arXiv 2402.03300; RLOO, arXiv 2402.14740.
    """
    rewards = vector(rewards, "rewards")
    require_rewards(rewards)
    function = BASELINES[baseline] if isinstance(baseline, Baseline) else baseline
    given = {
        "rewards": rewards,
        "squared_norms": squared_norms,
        "log_weights": log_weights,
        "num_tokens": num_tokens,
        "coverage": coverage,
    }
    wanted = {name: given[name] for name in numbers_wanted(function)}
    for name, values in wanted.items():
        if values is None:
            raise ValueError(f"{name} is None: baseline {baseline} needs one per trajectory")
    return list(function(**wanted))


@cache
def numbers_wanted(function: AdvantageFunction) -> tuple[str, ...]:
    """Return the names of the numbers that a baseline gets, which are those of its parameters."""
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in SHARED_NUMBERS:
            found.append(name)
        elif parameter.default is parameter.empty:
            raise ValueError(
                f"its parameter `{name}` is none of {', '.join(SHARED_NUMBERS)}; rename it, or give"
                " it a default"
            )
    return tuple(found)


def batch_advantages(
    groups: Matrix,
    baseline: Baseline | AdvantageFunction,
    scope: BaselineScope = BaselineScope.GROUP,
    squared_norms: Matrix | None = None,
    log_weights: Matrix | None = None,
    coverages: Vector | None = None,
    num_tokens: Matrix | None = None,
) -> list[list[float]]:
    """Return the advantages of a batch of groups, in the shape of the rewards.

    groups: [num_groups][n_g] raw rewards; the trajectories of one prompt are one group.
    scope: `group` gives each group its own baseline. `batch` gives all groups one, for
        `BATCH_BASELINES` and functions; a group of equal rewards may then have advantages other
        than 0.
    squared_norms, log_weights, num_tokens: the shape of groups; as for `advantages`.
    coverages: C of those that a baseline is computed from: [num_groups] with scope `group`, else
        [1]; 1 if None.
    Returns: [num_groups][n_g].
    Raises: ValueError if there is no group, if the shapes differ, if the number of coverages is
    another, or if the baseline does not have the scope; and as `advantages`.
    """
    groups = matrix(groups, "groups")
    squared_norms = None if squared_norms is None else matrix(squared_norms, "squared_norms")
    log_weights = None if log_weights is None else matrix(log_weights, "log_weights")
    num_tokens = None if num_tokens is None else matrix(num_tokens, "num_tokens")
    if not groups:
        raise ValueError("groups is empty: at least one group of rewards is needed")
    _require_shape("squared_norms", squared_norms, groups)
    _require_shape("log_weights", log_weights, groups)
    _require_shape("num_tokens", num_tokens, groups)
    shown = _coverages(coverages, len(groups) if scope is BaselineScope.GROUP else 1)
    if scope is BaselineScope.GROUP:
        norms = repeat(None) if squared_norms is None else squared_norms
        weights = repeat(None) if log_weights is None else log_weights
        lengths = repeat(None) if num_tokens is None else num_tokens
        rows = zip(groups, norms, weights, shown, lengths, strict=False)
        return [
            advantages(own, baseline, norms_of_own, weights_of_own, part, lengths_of_own)
            for own, norms_of_own, weights_of_own, part, lengths_of_own in rows
        ]
    if isinstance(baseline, Baseline) and baseline not in BATCH_BASELINES:
        raise ValueError(
            f"baseline is {baseline} with scope batch: only {', '.join(BATCH_BASELINES)} can have"
            " it; use scope group"
        )
    flat = advantages(
        list(chain.from_iterable(groups)),
        baseline,
        _flatten(squared_norms),
        _flatten(log_weights),
        shown[0],
        _flatten(num_tokens),
    )
    remaining = iter(flat)
    return [[next(remaining) for _ in group] for group in groups]


def _optimal(rewards: Sequence[float], squared_norms: Vector) -> list[float]:
    return _above(rewards, optimal_baseline(rewards, squared_norms))


def _pessimistic(rewards: Sequence[float], squared_norms: Vector, coverage: Scalar) -> list[float]:
    return _above(rewards, pessimistic_baseline(rewards, squared_norms, coverage))


def _deviations(rewards: Sequence[float]) -> list[float]:
    return _above(rewards, mean_baseline(rewards))


def _leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """Return R_i minus the mean of the other rewards, as n / (n - 1) (R_i - mean R)."""
    if len(rewards) < 2:
        raise ValueError("rewards has 1 entry: baseline rloo needs at least 2 trajectories")
    factor = len(rewards) / (len(rewards) - 1)
    return [factor * deviation for deviation in _deviations(rewards)]


def _standardized_rewards(rewards: Sequence[float]) -> list[float]:
    deviations = _deviations(rewards)
    std = math.hypot(*deviations) / math.sqrt(len(deviations))  # a tiny std does not underflow
    return [deviation / std for deviation in deviations] if std > 0.0 else deviations


def _above(rewards: Sequence[float], baseline: float) -> list[float]:
    return [reward - baseline for reward in rewards]


def _require_shape(
    name: str, values: Sequence[Sequence[float]] | None, groups: Sequence[Sequence[float]]
) -> None:
    if values is None:
        return
    sizes, expected = [len(group) for group in values], [len(group) for group in groups]
    if sizes != expected:
        raise ValueError(
            f"{name} has groups of {sizes} entries and groups of {expected}: give equal shapes"
        )


def _coverages(coverages: Vector | None, number: int) -> list[float]:
    if coverages is None:
        return [1.0] * number
    given = vector(coverages, "coverages")
    if len(given) != number:
        raise ValueError(
            f"coverages has {len(given)} entries: give {number}, one for each baseline"
        )
    return given


def _flatten(groups: Sequence[Sequence[float]] | None) -> list[float] | None:
    return None if groups is None else list(chain.from_iterable(groups))


def _rewards(rewards: Sequence[float]) -> Sequence[float]:
    return rewards


BASELINES: Final[Mapping[Baseline, AdvantageFunction]] = MappingProxyType(
    {
        Baseline.OPOB: _optimal,
        Baseline.PESSIMISTIC: _pessimistic,
        Baseline.GROUP_MEAN: _deviations,
        Baseline.RLOO: _leave_one_out_advantages,
        Baseline.GRPO: _standardized_rewards,
        Baseline.NONE: _rewards,
    }
)
"""The shipped baselines; a run's file can name any other function of this kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VTrace:
    """Value targets and advantages of one trajectory."""

    targets: tuple[float, ...]
    """[T] v_t, the target of the value before each token."""
    advantages: tuple[float, ...]
    """[T] A_t, the advantage of each token."""


def vtrace(log_ratios: Vector, rewards: Vector, values: Vector) -> VTrace:
    """Return value targets and advantages of the tokens of one trajectory.

    With u_t = min(1, pi/mu) of the token, and V = v = 0 after the last one, since a finished
    response is worth its reward and no more,

        delta_t = u_t (r_t + V_{t+1} - V_t)
        v_t     = V_t + delta_t + u_t (v_{t+1} - V_{t+1})            target of the value at t
        A_t     = u_t (r_t + v_{t+1} - V_t)                          advantage of token t.

    Source: IMPALA, arXiv 1802.01561, section 4.1, with both caps 1, discount 1 and lambda 1.
    log_ratios: [T] log pi - log mu, nats, of any size; -inf is a ratio of 0.
    rewards: [T] given after each token. values: [T] estimated by the critic before each token.
    Raises: ValueError if the lengths differ or there is no token; NonFiniteWeightError for a log
    ratio that is NaN or +inf, or a reward or value not finite.
    """
    log_ratios, rewards = vector(log_ratios, "log_ratios"), vector(rewards, "rewards")
    values = vector(values, "values")
    if not len(log_ratios) == len(rewards) == len(values):
        raise ValueError(
            f"log_ratios, rewards and values have {len(log_ratios)}, {len(rewards)} and "
            f"{len(values)} entries: give one of each per token"
        )
    require_log_weights(log_ratios, "log_ratios")
    _require_finite("rewards", rewards)
    _require_finite("values", values)
    targets, advantages = [], []
    next_value = next_target = 0.0
    for log_ratio, reward, value in reversed(list(zip(log_ratios, rewards, values, strict=True))):
        ratio = math.exp(min(log_ratio, 0.0))
        advantages.append(ratio * (reward + next_target - value))
        delta = ratio * (reward + next_value - value)
        next_target = value + delta + ratio * (next_target - next_value)
        next_value = value
        targets.append(next_target)
    return VTrace(targets=tuple(reversed(targets)), advantages=tuple(reversed(advantages)))


def _require_finite(name: str, values: Sequence[float]) -> None:
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise NonFiniteWeightError(name, index, value)
