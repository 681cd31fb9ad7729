r"""V-trace: value targets and advantages of one trajectory that another policy sampled.

With u_t = pi/mu of the token, rho_t = min(rho_cap, u_t) and c_t = lambda min(c_cap, u_t),

    delta_t = rho_t (r_t + gamma V_{t+1} - V_t)
    v_t     = V_t + delta_t + gamma c_t (v_{t+1} - V_{t+1})          target of the value at t
    A_t     = rho_t (r_t + gamma v_{t+1} - V_t)                      advantage of token t

with V = v = 0 after the last token: a finished response is worth its reward and no more.

If u_t is below 1 on average, the product of the c_t vanishes over a long response. v then
bootstraps over a short horizon, and the critic decides.

Source: IMPALA, arXiv 1802.01561, section 4.1; both caps are 1 there.
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


def vtrace(
    log_ratios: Vector,
    rewards: Vector,
    values: Vector,
    *,
    rho_cap: float = 1.0,
    c_cap: float = 1.0,
    discount: float = 1.0,
    trace_decay: float = 1.0,
) -> VTrace:
    """Return value targets and advantages of the tokens of one trajectory.

    log_ratios: [T] log pi - log mu, nats, of any size; -inf is a ratio of 0.
    rewards: [T] given after each token. values: [T] estimated by the critic before each token.
    rho_cap, c_cap: largest ratios in the temporal difference and in the trace, finite, above 0.
    discount, trace_decay: gamma and lambda, in [0, 1]; lambda multiplies every c_t.
    Raises: ValueError if the lengths differ, there is no token, or a setting is out of range;
    NonFiniteWeightError for a log ratio that is NaN or +inf, or a reward or value not finite.
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
    _require_settings(rho_cap, c_cap, discount, trace_decay)
    targets, advantages = [], []
    next_value = next_target = 0.0
    for log_ratio, reward, value in reversed(list(zip(log_ratios, rewards, values, strict=True))):
        rho, trace = (math.exp(min(log_ratio, math.log(cap))) for cap in (rho_cap, c_cap))
        delta = rho * (reward + discount * next_value - value)
        advantages.append(rho * (reward + discount * next_target - value))
        next_target = value + delta + discount * trace_decay * trace * (next_target - next_value)
        next_value = value
        targets.append(next_target)
    return VTrace(targets=tuple(reversed(targets)), advantages=tuple(reversed(advantages)))


def _require_finite(name: str, values: Sequence[float]) -> None:
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise NonFiniteWeightError(name, index, value)


def _require_settings(rho_cap: float, c_cap: float, discount: float, trace_decay: float) -> None:
    for name, value in (("rho_cap", rho_cap), ("c_cap", c_cap)):
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name} is {value}: give a finite ratio above 0, such as 1.0")
    for name, value in (("discount", discount), ("trace_decay", trace_decay)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}: give a number in [0, 1]")
