r"""V-trace: value targets and advantages of one trajectory that another policy sampled.

With u_t = min(1, pi/mu) of the token,

    delta_t = u_t (r_t + V_{t+1} - V_t)
    v_t     = V_t + delta_t + u_t (v_{t+1} - V_{t+1})                target of the value at t
    A_t     = u_t (r_t + v_{t+1} - V_t)                              advantage of token t

with V = v = 0 after the last token: a finished response is worth its reward and no more.

Source: IMPALA, arXiv 1802.01561, section 4.1, with both caps 1, discount 1 and lambda 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vcpo.algo.arrays import Vector, vector
from vcpo.algo.ess.importance_weights import NonFiniteWeightError, require_log_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class VTrace:
    """Value targets and advantages of one trajectory."""

    targets: tuple[float, ...]
    """[T] v_t, the target of the value before each token."""
    advantages: tuple[float, ...]
    """[T] A_t, the advantage of each token."""


def vtrace(log_ratios: Vector, rewards: Vector, values: Vector) -> VTrace:
    """Return value targets and advantages of the tokens of one trajectory.

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
