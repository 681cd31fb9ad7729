r"""The on-policy ESS ratio, estimated from fresh tokens during a run.

Training and inference engines disagree a little on every token (kernels, bf16, batching). So even a
trajectory that was sampled with the learner's own parameters has w != 1. With a mismatch of
variance s2 per token, and E[w] = 1 because w is a ratio of probabilities,

    log w | L ~ N(-s2 L / 2, s2 L),    L = number of trained tokens.

Prediction. The moments of this log-normal law are E[w] = 1 and E[w^2 | L] = exp(s2 L). For a batch
of lengths L_1..L_B,

    rho_on = E[w]^2 / E[w^2] = 1 / mean_i exp(s2 L_i) = B / sum_i exp(s2 L_i),

the harmonic mean of the ratios exp(-s2 L_i) of the single lengths, and at least 1/B. With
s2 = 6.5e-4, typical of bf16, it is 0.68 at 600 tokens and 0.006 at 8,000. `finite_batch` says what
a batch of B trajectories shows of this ratio.

Observation. A block is a run of `FRESH_BLOCK_TOKENS` tokens that one policy version sampled. It is
fresh while the learner still has that version. Blocks may stand for whole trajectories, for this
reason: given its prefix, the ratio of a token has mean 1 under the behavior policy, whatever the
two policies are. Ratios minus 1 are therefore martingale differences. To first order log w is their
sum, the terms are uncorrelated, and the variance adds up over tokens. Longer blocks would be fewer.
Single tokens are far from normal, because most of them agree to many digits and a few do not.

Estimation. For fresh blocks x_i = log w_i the log likelihood of s2,

    sum_i [ -log(s2 L_i) / 2 - (x_i + s2 L_i / 2)^2 / (2 s2 L_i) ],

has one maximum, where (A / 4) s2^2 + s2 - Q = 0 with A = mean L_i and Q = mean x_i^2 / L_i:

    s2 = 2 (sqrt(1 + A Q) - 1) / A,    with a relative standard error of sqrt(2 / n) at most.

Robustness. Before the estimate, every x_i is clipped to 3 standard deviations of its own law. The
scale of that law comes from the blocks of the step, with the largest sixteenth of x_i^2 / L_i
replaced by the next lower value (winsorized). Outliers up to that share do not move the scale. A
median would ignore a mismatch that only a minority of the blocks shows. Clipping 0.27 % of a normal
law changes s2 by less than 1 %. A step with few blocks takes the scale from the remembered steps.
Weights are never exponentiated. Three sums are kept per step.

Memory. A constant mismatch needs a long memory, a changing one a short memory. The blocks of the
last 1, 2, 3, 5, 8, .. steps with fresh blocks are pooled. The estimate is that of the longest pool
whose interval s2 (1 +- sqrt(2 / n)) intersects the intervals of all shorter pools (intersection of
confidence intervals). Without fresh blocks the estimate stays and its error grows: its variance
doubles every 32 steps, up to a relative error of 1.

Limit. For s2 L above about 2, whole trajectories have a ratio near the floor 1/B on policy, too. A
step must then lose far more than the mismatch costs before the rule of `learning_rate` reacts.
Blocks are more sensitive there (see `unit`).

Sources: VCPO, arXiv 2602.17616, Eq. 5 (rho_on as a given constant). Goldenshluger and Nemirovski,
"On spatially adaptive estimation of nonparametric regression" (1997), for the choice of the pool.
The length law, its estimate and its prediction are this project's. The release has one constant per
script (1.0 or 0.55).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from vcpo.algo.arrays import Vector, counts, vector
from vcpo.algo.ess.importance_weights import log_sum_exp, require_log_weights

FRESH_BLOCK_TOKENS: Final = 32
"""Tokens of a fresh block: enough for a sum to be nearly normal, few enough for many blocks."""

PRECISE_COUNT: Final = 2048
"""Number of blocks that is enough: it gives a standard error of 3 %."""

_UPKEEP_COUNT: Final = 128
"""Blocks per step that keep a precise estimate current: a change of a third shows in 3 steps."""

_REACH: Final = 3.0
"""Standard deviations to which a log weight is clipped."""

_EXTREME_SHARE: Final = 1 / 16
"""Share of a step's blocks, the most extreme ones, that is winsorized before the scale is taken."""

_OWN_SCALE_COUNT: Final = 8
"""Number of blocks from which a step determines the scale by itself."""

_CONFIDENCE: Final = 1.0
"""Half width of the intervals that must intersect, in standard errors."""

_POOL_GROWTH: Final = 1.5
"""Factor from the number of steps of one pool to that of the next."""

_REMEMBERED_STEPS: Final = 256
"""Number of steps with fresh blocks that are remembered."""

STALE_STEPS: Final = 32
"""Steps without fresh blocks in which the variance of the estimate doubles; it then counts as
stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshSums:
    """Sums over the fresh blocks of one or several steps."""

    count: int
    """Number of blocks, at least 1."""

    num_tokens: int
    """Tokens of all blocks, at least one each."""

    square_sum: float
    """Sum of (log w)^2 / tokens over blocks, log w clipped; nats^2 per token, finite, >= 0."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= self.num_tokens:
            raise ValueError(
                f"count is {self.count} and num_tokens {self.num_tokens}: "
                "give at least 1, and at least one token for each block"
            )
        if not 0.0 <= self.square_sum < math.inf:
            raise ValueError(f"square_sum is {self.square_sum}: give a finite number, 0 or above")

    @property
    def variance_per_token(self) -> float:
        """Maximum-likelihood estimate of s2, nats^2 per token, at least 0.

        Computed with sqrt(1 + AQ) - 1 = AQ / (sqrt(1 + AQ) + 1), which is exact for a tiny AQ.
        """
        mean_length = self.num_tokens / self.count
        mean_square = self.square_sum / self.count
        return 2.0 * mean_square / (math.sqrt(1.0 + mean_length * mean_square) + 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchCalibration:
    """Per-token mismatch between the engines, estimated from fresh blocks; immutable."""

    minimum_count: int = 16
    """Number of blocks before a prediction is made, at least 1; 16 blocks leave a standard error of
    35 %, which `relative_error` reports."""

    steps: tuple[FreshSums, ...] = ()
    """The remembered steps with fresh blocks, oldest first."""

    age_steps: int = 0
    """Optimizer steps since the last fresh block, or since the start; at least 0."""

    def __post_init__(self) -> None:
        if self.minimum_count < 1 or self.age_steps < 0:
            raise ValueError(
                f"minimum_count is {self.minimum_count} and age_steps {self.age_steps}: "
                "give at least 1 and 0"
            )

    def observe(self, log_weights: Vector, num_tokens: Vector) -> Self:
        """Return the calibration after one more optimizer step with these fresh blocks.

        log_weights: [n] nats, of blocks that the learner's own version sampled. Entries of -inf
            have no scale and are ignored. Without other entries only the age grows.
        num_tokens: [n] trained tokens of each block, at least 1, about `FRESH_BLOCK_TOKENS`.
        Raises: ValueError if the lengths differ or a block has no token; NonFiniteWeightError for a
        NaN or +inf.
        """
        log_weights, num_tokens = (
            vector(log_weights, "log_weights"),
            counts(num_tokens, "num_tokens"),
        )
        if len(log_weights) != len(num_tokens):
            raise ValueError(
                f"log_weights has {len(log_weights)} entries and num_tokens {len(num_tokens)}: "
                "give one of each per block"
            )
        _require_lengths(num_tokens, at_least=1)
        if log_weights:
            require_log_weights(log_weights)
        rows = zip(log_weights, num_tokens, strict=True)
        fresh = [(x, length) for x, length in rows if x > -math.inf]
        if not fresh:
            return replace(self, age_steps=self.age_steps + 1)
        newest = _clipped_sums(fresh, self.estimate)
        return replace(self, steps=(*self.steps, newest)[-_REMEMBERED_STEPS:], age_steps=0)

    @property
    def estimate(self) -> FreshSums | None:
        """Sums over the pool of steps behind the estimate; None before `minimum_count` blocks."""
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
        """Estimate of s2, nats^2 per token, at least 0; None before `minimum_count` blocks."""
        estimate = self.estimate
        return None if estimate is None else estimate.variance_per_token

    @property
    def relative_error(self) -> float:
        """Standard error of s2 over s2, in [0, 1]; 0 before `minimum_count` blocks."""
        estimate = self.estimate
        if estimate is None:
            return 0.0
        doublings = min(self.age_steps / STALE_STEPS, math.log2(estimate.count))
        return min(1.0, math.sqrt(2.0**doublings * 2.0 / estimate.count))

    @property
    def wanted_count(self) -> int:
        """Number of fresh blocks that the next step should score."""
        estimate = self.estimate
        pooled = 0 if estimate is None else estimate.count
        return max(PRECISE_COUNT - pooled, _UPKEEP_COUNT)

    def on_policy_ess_ratio(self, num_tokens: Vector) -> float:
        """Return the expected ESS ratio of an on-policy batch, B / sum_i exp(s2 L_i).

        num_tokens: [B] trained tokens of each trajectory, at least 0.
        Returns a value in [1/B, 1]; 1.0 before `minimum_count` blocks.
        Raises: ValueError if empty or for a negative length.
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
        """Return the observations as JSON values for a checkpoint, without the settings."""
        rows = [[step.count, step.num_tokens, step.square_sum] for step in self.steps]
        return {"age_steps": self.age_steps, "steps": rows}

    def restore(self, state: Mapping[str, Any]) -> Self:
        """Return this calibration's settings with the observations that `to_dict` returned.

        Raises: ValueError if the state has another form or an observation is out of range.
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
        """Yield the sums over the newest 1, 2, 3, 5, .. steps and over all steps."""
        count, num_tokens, square_sum, wanted = 0, 0, 0.0, 1.0
        for number, step in enumerate(reversed(self.steps), start=1):
            count += step.count
            num_tokens += step.num_tokens
            square_sum += step.square_sum
            if number >= wanted or number == len(self.steps):
                yield FreshSums(count=count, num_tokens=num_tokens, square_sum=square_sum)
                wanted = max(wanted * _POOL_GROWTH, number + 1)


def _require_lengths(num_tokens: Sequence[int], *, at_least: int) -> None:
    for index, length in enumerate(num_tokens):
        if length < at_least:
            raise ValueError(f"num_tokens[{index}] is {length}: give at least {at_least}")


def _clipped_sums(fresh: Sequence[tuple[float, int]], remembered: FreshSums | None) -> FreshSums:
    """Return the sums over a step's blocks, each clipped to `_REACH` deviations of its law."""
    if remembered is not None and len(fresh) < _OWN_SCALE_COUNT:
        return _sums(fresh, remembered.variance_per_token)
    return _sums(fresh, _sums(fresh, _winsorized_variance(fresh)).variance_per_token)


def _winsorized_variance(fresh: Sequence[tuple[float, int]]) -> float:
    """Return the variance per token with the largest squares replaced by the next lower one."""
    num_extreme = math.ceil(_EXTREME_SHARE * len(fresh))
    squares = sorted(x * x / length for x, length in fresh)
    kept = squares[:-num_extreme] or squares
    return FreshSums(
        count=len(fresh),
        num_tokens=sum(length for _, length in fresh),
        square_sum=math.fsum(kept) + (len(fresh) - len(kept)) * kept[-1],
    ).variance_per_token


def _sums(blocks: Sequence[tuple[float, int]], variance_per_token: float) -> FreshSums:
    """Return the sums over blocks, with log weights clipped to the law of this variance."""
    squares = []
    for x, length in blocks:
        variance = variance_per_token * length
        reach = _REACH * math.sqrt(variance)
        clipped = min(max(x, -variance / 2 - reach), -variance / 2 + reach)
        squares.append(clipped * clipped / length)
    return FreshSums(
        count=len(blocks),
        num_tokens=sum(length for _, length in blocks),
        square_sum=math.fsum(squares),
    )
