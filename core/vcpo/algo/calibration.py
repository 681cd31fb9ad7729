r"""The ESS ratio that trajectories have on policy, learnt from fresh ones.

Training and inference engines disagree a little on every token (kernels, bf16, batching), so even a
trajectory sampled by the very parameters that learn from it has w != 1. With independent token
errors of variance s2, and E[w] = 1 because w is a ratio of probabilities,

    log w | L ~ N(-s2 L / 2, s2 L),    L = number of trained tokens.

Prediction. The moments of that log-normal are E[w] = 1 and E[w^2 | L] = exp(s2 L). Over a batch of
lengths L_1..L_B,

    rho_on = E[w]^2 / E[w^2] = 1 / mean_i exp(s2 L_i) = B / sum_i exp(s2 L_i),

the harmonic mean of the ratios exp(-s2 L_i) that each length has alone, and never under the floor
1/B. With s2 = 6.5e-4, typical of bf16, it is 0.68 at 600 tokens and 0.006 at 8,000.

Estimation. For fresh trajectories x_i = log w_i the log likelihood of s2,

    sum_i [ -log(s2 L_i) / 2 - (x_i + s2 L_i / 2)^2 / (2 s2 L_i) ],

has one maximum, where (A / 4) s2^2 + s2 - Q = 0 with A = mean L_i and Q = mean x_i^2 / L_i:

    s2 = 2 (sqrt(1 + A Q) - 1) / A.

The spread and the drift of log w both speak in it, at any length. Means are weighted by 2^(-age /
half-life), age in trajectories seen since. For robustness every x_i is pulled in to 3 standard
deviations of its own law first; the scale for that starts at the weighted median of the estimates
from single trajectories (0.45 to 1 times s2, whatever fewer than half of them do) and is settled by
fixed-point steps. Pulling in 0.27 % of a normal law costs s2 less than 1 %. Weights are never
exponentiated.

Limit. rho of a finite batch lies above rho_on when s2 L is large, for want of the rare huge weight:
with B = 64 its median is 0.45 where rho_on is 0.37 (s2 L = 1), 0.25 where it is 0.14 (s2 L = 2) and
0.13 where it is 0.018 (s2 L = 4). Past s2 L of about 2 the sequence-level ratio is near its floor
on policy already, and a step must lose far more than mismatch costs before the rule of
`learning_rate` sees it; token-level ESS speaks there (see `weights`).

Sources: VCPO, arXiv 2602.17616, Eq. 5 (rho_on as a given constant). The length law, its estimate
and its prediction are this project's; the release has a constant per script (1.0 or 0.55).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from vcpo.algo.weights import log_sum_exp, require_log_weights

_REACH = 3.0
"""Standard deviations beyond which a log weight is pulled in."""

_FIXED_POINT_STEPS = 4
"""Enough from a start at 0.45 of the scale: one step ends at 0.93 of it, two at 0.99."""

_WINDOW_HALF_LIVES = 4
"""Age at which an observation is let go, in half-lives; it weighs 1/16 then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshTrajectory:
    """What calibration keeps of a trajectory that was trained on by the version that sampled it."""

    log_weight: float
    """Log importance weight, nats, finite; mismatch alone, since the lag is 0."""

    num_tokens: int
    """Trained tokens, at least 1."""

    age: int = 0
    """Fresh trajectories observed after it."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.log_weight):
            raise ValueError(f"log_weight is {self.log_weight}: give a finite number")
        if self.num_tokens < 1 or self.age < 0:
            raise ValueError(
                f"num_tokens is {self.num_tokens} and age {self.age}: give at least 1 and 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchCalibration:
    """Per-token mismatch between the engines, estimated from fresh trajectories; immutable."""

    half_life: float = 256.0
    """Age in fresh trajectories, above 0, at which an observation counts half; 256 leaves the
    estimate a standard error of about 5 % and follows a change within a few steps."""

    minimum_count: int = 32
    """Observations before a prediction is made, at least 1 and at most the 4 half-lives that are
    remembered; 32 leave a standard error of 25 %."""

    trajectories: tuple[FreshTrajectory, ...] = ()
    """The observations still remembered, oldest first."""

    def __post_init__(self) -> None:
        if not 0.0 < self.half_life < math.inf:
            raise ValueError(f"half_life is {self.half_life}: give a finite number above 0")
        window = _WINDOW_HALF_LIVES * self.half_life
        if not 1 <= self.minimum_count <= window:
            raise ValueError(
                f"minimum_count is {self.minimum_count}: give at least 1 and at most {window:g}, "
                f"which is all that half_life {self.half_life:g} remembers"
            )

    def observe(self, log_weights: Sequence[float], num_tokens: Sequence[int]) -> Self:
        """Calibration that has also seen the fresh trajectories of one step.

        log_weights: [n] nats, of trajectories at lag 0 only; a -inf has no scale and is left out.
        num_tokens: [n] trained tokens, at least 1.
        The order within a call does not matter. An empty call changes nothing.
        Raises: ValueError when the lengths differ or a trajectory has no token;
        NonFiniteWeightError at a NaN or +inf.
        """
        if len(log_weights) != len(num_tokens):
            raise ValueError(
                f"log_weights has {len(log_weights)} entries and num_tokens {len(num_tokens)}: "
                "give one of each per trajectory"
            )
        _require_lengths(num_tokens, at_least=1)
        if not log_weights:
            return self
        require_log_weights(log_weights)
        fresh = [
            FreshTrajectory(log_weight=log_weight, num_tokens=length)
            for log_weight, length in zip(log_weights, num_tokens, strict=True)
            if log_weight > -math.inf
        ]
        aged = (replace(seen, age=seen.age + len(fresh)) for seen in self.trajectories)
        kept = [seen for seen in aged if seen.age <= _WINDOW_HALF_LIVES * self.half_life]
        return replace(self, trajectories=(*kept, *fresh))

    @property
    def is_ready(self) -> bool:
        """Whether enough was observed for a prediction."""
        return len(self.trajectories) >= self.minimum_count

    @property
    def variance_per_token(self) -> float | None:
        """Estimate of s2, nats^2 per token, at least 0; None until enough was observed."""
        if not self.is_ready:
            return None
        weights = [2.0 ** (-seen.age / self.half_life) for seen in self.trajectories]
        return _robust_variance_per_token(self.trajectories, weights)

    def on_policy_ess_ratio(self, num_tokens: Sequence[int]) -> float:
        """ESS ratio to expect of an on-policy batch with these lengths, B / sum_i exp(s2 L_i).

        num_tokens: [B] trained tokens, at least 0.
        Returns a value in [1/B, 1]; 1.0 until enough was observed.
        Raises: ValueError when empty or at a negative length.
        """
        if not num_tokens:
            raise ValueError("num_tokens is empty: at least one trajectory is needed")
        _require_lengths(num_tokens, at_least=0)
        variance_per_token = self.variance_per_token
        if variance_per_token is None:
            return 1.0
        size = len(num_tokens)
        log_sum = log_sum_exp([variance_per_token * length for length in num_tokens])
        return min(max(math.exp(math.log(size) - log_sum), 1.0 / size), 1.0)

    def to_dict(self) -> dict[str, Any]:
        """What was observed, as plain JSON values for a checkpoint; settings are not part of it."""
        rows = [[seen.log_weight, seen.num_tokens, seen.age] for seen in self.trajectories]
        return {"trajectories": rows}

    def restored(self, state: Mapping[str, Any]) -> Self:
        """This calibration's settings with the observations that `to_dict` returned.

        Settings come from the run's spec, so that a resumed run follows a spec that was changed.
        Raises: ValueError when the state has another form or holds an impossible observation.
        """
        try:
            rows = [(float(x), int(length), int(age)) for x, length, age in state["trajectories"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"state is {str(state)[:80]}: give what to_dict returned, "
                "{'trajectories': [[log_weight, num_tokens, age], ...]}"
            ) from error
        seen = [FreshTrajectory(log_weight=x, num_tokens=n, age=age) for x, n, age in rows]
        return replace(self, trajectories=tuple(seen))


def _require_lengths(num_tokens: Sequence[int], *, at_least: int) -> None:
    for index, length in enumerate(num_tokens):
        if length < at_least:
            raise ValueError(f"num_tokens[{index}] is {length}: give at least {at_least}")


def _robust_variance_per_token(
    trajectories: Sequence[FreshTrajectory], weights: Sequence[float]
) -> float:
    """Winsorized maximum likelihood of s2; 0.0 when most log weights are exactly 0."""
    lengths = [seen.num_tokens for seen in trajectories]
    singles = [_likeliest([seen.log_weight], [seen.num_tokens], [1.0]) for seen in trajectories]
    estimate = _weighted_median(singles, weights)
    for _ in range(_FIXED_POINT_STEPS):
        pulled_in = [_winsorized(seen, estimate * seen.num_tokens) for seen in trajectories]
        estimate = _likeliest(pulled_in, lengths, weights)
    return estimate


def _likeliest(
    log_weights: Sequence[float], lengths: Sequence[int], weights: Sequence[float]
) -> float:
    """Maximum likelihood of s2; sqrt(1 + AQ) - 1 = AQ / (sqrt(1 + AQ) + 1) keeps a tiny AQ."""
    total = math.fsum(weights)
    rows = list(zip(log_weights, lengths, weights, strict=True))
    mean_length = math.fsum(weight * length for _, length, weight in rows) / total
    mean_square = math.fsum(weight * x * x / length for x, length, weight in rows) / total
    return 2.0 * mean_square / (math.sqrt(1.0 + mean_length * mean_square) + 1.0)


def _winsorized(seen: FreshTrajectory, variance: float) -> float:
    """Log weight, pulled in to within `_REACH` deviations of the law N(-variance / 2, variance)."""
    reach = _REACH * math.sqrt(variance)
    return min(max(seen.log_weight, -variance / 2 - reach), -variance / 2 + reach)


def _weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """Smallest value at or below which half of the weight lies."""
    half = math.fsum(weights) / 2
    below = 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        below += weight
        if below >= half:
            return value
    return max(values)
