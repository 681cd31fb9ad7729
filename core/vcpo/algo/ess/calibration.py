r"""The ESS ratio that trajectories have on policy, learnt from fresh tokens while a run lasts.

Training and inference engines disagree a little on every token (kernels, bf16, batching), so even a
trajectory sampled by the very parameters that learn from it has w != 1. With a mismatch of variance
s2 per token, and E[w] = 1 because w is a ratio of probabilities,

    log w | L ~ N(-s2 L / 2, s2 L),    L = number of trained tokens.

Prediction. The moments of that log-normal are E[w] = 1 and E[w^2 | L] = exp(s2 L). Over a batch of
lengths L_1..L_B,

    rho_on = E[w]^2 / E[w^2] = 1 / mean_i exp(s2 L_i) = B / sum_i exp(s2 L_i),

the harmonic mean of the ratios exp(-s2 L_i) that each length has alone, and never under the floor
1/B. With s2 = 6.5e-4, typical of bf16, it is 0.68 at 600 tokens and 0.006 at 8,000. What a batch of
B shows of it is the subject of `finite_batch`.

Observation. A block is a run of `FRESH_BLOCK_TOKENS` tokens that one policy version sampled. It is
fresh while the learner still has that version. Blocks may stand for whole trajectories: given its
prefix, the ratio of a token has mean 1 under the sampler, whatever the two policies are, so that
ratios minus 1 are martingale differences. To first order in them log w is their sum, its terms are
uncorrelated, and its variance adds up over tokens. Long pieces would be few; single tokens are far
from normal, as most of them agree to many digits and a few do not.

Estimation. For fresh pieces x_i = log w_i the log likelihood of s2,

    sum_i [ -log(s2 L_i) / 2 - (x_i + s2 L_i / 2)^2 / (2 s2 L_i) ],

has one maximum, where (A / 4) s2^2 + s2 - Q = 0 with A = mean L_i and Q = mean x_i^2 / L_i:

    s2 = 2 (sqrt(1 + A Q) - 1) / A,    with a relative standard error of sqrt(2 / n) at most.

For robustness every x_i is pulled in to 3 standard deviations of its own law first. The scale for
that comes from the pieces of the step with the largest sixteenth of x_i^2 / L_i taken for the next
lower: fewer than that do not move it, and a mismatch that most pieces do not show is not lost, as
it would be with a median. Pulling in 0.27 % of a normal law costs s2 less than 1 %. Steps with few
pieces take the scale from what is remembered.
Weights are never exponentiated. A step is kept as three sums.

Memory. A mismatch that stands still wants a long memory, one that moves wants a short one. The last
1, 2, 3, 5, 8, .. steps that saw anything are pooled, and the longest pool counts whose interval
s2 (1 +- sqrt(2 / n)) meets those of all shorter ones: the intersection of confidence intervals.
Without news the estimate stays, and its error grows: twice the variance for 32 steps, until the
mismatch may as well be twice as large.

Limit. Past s2 L of about 2 the ratio of whole trajectories is near its floor on policy already, and
a step must lose far more than mismatch costs before the rule of `learning_rate` sees it; shorter
units speak there (see `ess_unit`).

Sources: VCPO, arXiv 2602.17616, Eq. 5 (rho_on as a given constant). Goldenshluger and Nemirovski,
"On spatially adaptive estimation of nonparametric regression" (1997), for the choice of the pool.
The length law, its estimate and its prediction are this project's; the release has a constant per
script (1.0 or 0.55).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from vcpo.algo.arrays import Vector, counts, vector
from vcpo.algo.ess.importance_weights import log_sum_exp, require_log_weights

FRESH_BLOCK_TOKENS: Final = 32
"""Tokens of a fresh piece: enough for a sum to be near normal, few enough for many pieces."""

PRECISE_COUNT: Final = 2048
"""Pieces that are enough: a standard error of 3 %, which moves no scale by more."""

_UPKEEP_COUNT: Final = 128
"""Pieces a step that keep a precise estimate up to date: a change of a third shows in 3 steps."""

_REACH: Final = 3.0
"""Standard deviations beyond which a log weight is pulled in."""

_DOUBTED_SHARE: Final = 1 / 16
"""Part of a step's pieces, the most extreme, that does not set the scale."""

_OWN_SCALE_COUNT: Final = 8
"""Pieces from which a step finds the scale by itself."""

_CONFIDENCE: Final = 1.0
"""Half width of the intervals that must meet, in standard errors."""

_POOL_GROWTH: Final = 1.5
"""Each pool has so many times the steps of the one before."""

_REMEMBERED_STEPS: Final = 256
"""Steps with fresh pieces that are remembered."""

STALE_STEPS: Final = 32
"""Steps without news in which the variance of the estimate doubles: it counts as old then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshSums:
    """What the fresh pieces of one step, or of several, add up to."""

    count: int
    """Pieces, at least 1."""

    num_tokens: int
    """Tokens of all pieces, at least one each."""

    square_sum: float
    """Sum of (log w)^2 / tokens over pieces, nats^2 per token, pulled in; finite, at least 0."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= self.num_tokens:
            raise ValueError(
                f"count is {self.count} and num_tokens {self.num_tokens}: "
                "give at least 1, and a token for each piece"
            )
        if not 0.0 <= self.square_sum < math.inf:
            raise ValueError(f"square_sum is {self.square_sum}: give a finite number, 0 or above")

    @property
    def variance_per_token(self) -> float:
        """Maximum likelihood of s2; sqrt(1 + AQ) - 1 = AQ / (sqrt(1 + AQ) + 1) keeps a tiny AQ."""
        mean_length = self.num_tokens / self.count
        mean_square = self.square_sum / self.count
        return 2.0 * mean_square / (math.sqrt(1.0 + mean_length * mean_square) + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchCalibration:
    """Per-token mismatch between the engines, estimated from fresh pieces; immutable."""

    minimum_count: int = 16
    """Pieces before a prediction is made, at least 1; 16 leave a standard error of 35 %, which
    whoever uses the estimate is told."""

    steps: tuple[FreshSums, ...] = ()
    """The steps still remembered that saw fresh pieces, oldest first."""

    age_steps: int = 0
    """Optimizer steps since a fresh piece was seen, or since the start; at least 0."""

    def __post_init__(self) -> None:
        if self.minimum_count < 1 or self.age_steps < 0:
            raise ValueError(
                f"minimum_count is {self.minimum_count} and age_steps {self.age_steps}: "
                "give at least 1 and 0"
            )

    def observe(self, log_weights: Vector, num_tokens: Vector) -> Self:
        """Calibration one optimizer step later, having seen that step's fresh pieces.

        log_weights: [n] nats, of pieces that the learner's own version sampled; a -inf has no scale
            and is left out. Without any, what is remembered grows older.
        num_tokens: [n] trained tokens, at least 1; `FRESH_BLOCK_TOKENS` or so.
        Raises: ValueError when the lengths differ or a piece has no token; NonFiniteWeightError at
        a NaN or +inf.
        """
        log_weights, num_tokens = (
            vector(log_weights, "log_weights"),
            counts(num_tokens, "num_tokens"),
        )
        if len(log_weights) != len(num_tokens):
            raise ValueError(
                f"log_weights has {len(log_weights)} entries and num_tokens {len(num_tokens)}: "
                "give one of each per piece"
            )
        _require_lengths(num_tokens, at_least=1)
        if log_weights:
            require_log_weights(log_weights)
        rows = zip(log_weights, num_tokens, strict=True)
        fresh = [(x, length) for x, length in rows if x > -math.inf]
        if not fresh:
            return replace(self, age_steps=self.age_steps + 1)
        newest = _pulled_in(fresh, self.estimate)
        return replace(self, steps=(*self.steps, newest)[-_REMEMBERED_STEPS:], age_steps=0)

    @property
    def estimate(self) -> FreshSums | None:
        """The pool of steps that the estimate is made of; None until enough was observed."""
        chosen: FreshSums | None = None
        low, high = 0.0, math.inf
        for pool in self._pools():
            if pool.count < self.minimum_count:
                continue
            variance, reach = pool.variance_per_token, _CONFIDENCE * math.sqrt(2.0 / pool.count)
            low, high = max(low, variance * (1.0 - reach)), min(high, variance * (1.0 + reach))
            if low > high:
                break
            chosen = pool
        return chosen

    @property
    def variance_per_token(self) -> float | None:
        """Estimate of s2, nats^2 per token, at least 0; None until enough was observed."""
        estimate = self.estimate
        return None if estimate is None else estimate.variance_per_token

    @property
    def relative_error(self) -> float:
        """Standard error of s2 as a part of it, in [0, 1]; 0 until enough was observed."""
        estimate = self.estimate
        if estimate is None:
            return 0.0
        doublings = min(self.age_steps / STALE_STEPS, math.log2(estimate.count))
        return min(1.0, math.sqrt(2.0**doublings * 2.0 / estimate.count))

    @property
    def wanted_count(self) -> int:
        """Fresh pieces that the next step should see."""
        estimate = self.estimate
        known = 0 if estimate is None else estimate.count
        return max(PRECISE_COUNT - known, _UPKEEP_COUNT)

    def on_policy_ess_ratio(self, num_tokens: Vector) -> float:
        """ESS ratio to expect of an on-policy batch with these lengths, B / sum_i exp(s2 L_i).

        num_tokens: [B] trained tokens, at least 0.
        Returns a value in [1/B, 1]; 1.0 until enough was observed.
        Raises: ValueError when empty or at a negative length.
        """
        num_tokens = counts(num_tokens, "num_tokens")
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
        rows = [[seen.count, seen.num_tokens, seen.square_sum] for seen in self.steps]
        return {"age_steps": self.age_steps, "steps": rows}

    def restore(self, state: Mapping[str, Any]) -> Self:
        """This calibration's settings with the observations that `to_dict` returned.

        Raises: ValueError when the state has another form or holds an impossible observation.
        """
        try:
            steps = tuple(
                FreshSums(
                    count=int(count), num_tokens=int(num_tokens), square_sum=float(square_sum)
                )
                for count, num_tokens, square_sum in state["steps"]
            )
            return replace(self, steps=steps, age_steps=int(state["age_steps"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"state is {str(state)[:80]}: give what to_dict returned, {{'age_steps': .., "
                f"'steps': [[count, num_tokens, square_sum], ...]}} ({error})"
            ) from error

    def _pools(self) -> Iterator[FreshSums]:
        """Sums over the newest 1, 2, 3, 5, .. steps, and over all of them."""
        count, num_tokens, square_sum, wanted = 0, 0, 0.0, 1.0
        for number, seen in enumerate(reversed(self.steps), start=1):
            count += seen.count
            num_tokens += seen.num_tokens
            square_sum += seen.square_sum
            if number >= wanted or number == len(self.steps):
                yield FreshSums(count=count, num_tokens=num_tokens, square_sum=square_sum)
                wanted = max(wanted * _POOL_GROWTH, number + 1)


def _require_lengths(num_tokens: Sequence[int], *, at_least: int) -> None:
    for index, length in enumerate(num_tokens):
        if length < at_least:
            raise ValueError(f"num_tokens[{index}] is {length}: give at least {at_least}")


def _pulled_in(fresh: Sequence[tuple[float, int]], remembered: FreshSums | None) -> FreshSums:
    """Sums over a step's pieces, each pulled in to within `_REACH` deviations of its law."""
    if remembered is not None and len(fresh) < _OWN_SCALE_COUNT:
        return _sums(fresh, remembered.variance_per_token)
    return _sums(fresh, _sums(fresh, _undoubted_scale(fresh)).variance_per_token)


def _undoubted_scale(fresh: Sequence[tuple[float, int]]) -> float:
    """Variance per token, with the most extreme pieces taken for the next lower; all of one."""
    doubted = math.ceil(_DOUBTED_SHARE * len(fresh))
    squares = sorted(x * x / length for x, length in fresh)
    kept = squares[:-doubted] or squares
    return FreshSums(
        count=len(fresh),
        num_tokens=sum(length for _, length in fresh),
        square_sum=math.fsum(kept) + (len(fresh) - len(kept)) * kept[-1],
    ).variance_per_token


def _sums(pieces: Sequence[tuple[float, int]], scale: float) -> FreshSums:
    """Sums over pieces, with log weights beyond the reach of a variance per token pulled in."""
    squares = []
    for x, length in pieces:
        variance = scale * length
        reach = _REACH * math.sqrt(variance)
        held = min(max(x, -variance / 2 - reach), -variance / 2 + reach)
        squares.append(held * held / length)
    return FreshSums(
        count=len(pieces),
        num_tokens=sum(length for _, length in pieces),
        square_sum=math.fsum(squares),
    )
