r"""Diagnostics of one batch: numbers to monitor, none of which decides anything.

ESS ratios are given for trajectories and for tokens, before truncation, which hides the spread (see
`ess.importance_weights`).

KL divergence is k3, the mean over tokens of r - 1 - log r with r = pi / mu. It is unbiased, because
the mean of r is 1, and never negative. Log ratios are clamped to +-20 nats, so that one token
cannot dominate the mean.

Signal and noise of the gradient g = sum_i k_i h_i, squared lengths (docs/methods.md derives them):

    signal       (|g|^2 - noise) B / (B - 1), of the expected gradient; the mean over pairs, so it
                 may be negative
    noise        sum_i k_i^2 |h_i|^2
    fresh noise  sum_i k_i^2 |h_i|^2 / w_i, as a batch of the learner's own policy would have it

Pairs of one prompt count too, so the signal holds a share of what differs between prompts.

Sources: Kish, Survey Sampling (1965) (ESS); Schulman, http://joschu.net/blog/kl-approx.html (k3);
noise scale of gradients: arXiv 1812.06162.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeVar

from vcpo.algo.arrays import Vector, vector
from vcpo.algo.ess.importance_weights import LARGEST_LOG_RATIO, WeightMoments

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums:
    """Sums over token log ratios."""

    weights: WeightMoments
    """Moments of the token ratios pi / mu."""

    k3_sum: float
    """Sum over tokens of r - 1 - log r, nats."""

    @classmethod
    def of(cls, log_ratios: Vector) -> Self:
        """Return the sums over these tokens.

        log_ratios: [n] log pi - log mu, nats.
        Raises: ValueError if empty; NonFiniteWeightError for a NaN or +inf.
        """
        log_ratios = vector(log_ratios, "log_ratios")
        return cls(weights=WeightMoments.of(log_ratios), k3_sum=math.fsum(map(k3, log_ratios)))

    @property
    def kl_per_token(self) -> float:
        return self.k3_sum / self.weights.count


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDiagnostics:
    """Diagnostics of one batch."""

    ess_ratio: float
    """ESS ratio of trajectories before truncation, in [1/B, 1]."""
    token_ess_ratio: float
    """ESS ratio of tokens before truncation, in (0, 1]."""
    kl_per_token: float
    """KL(behavior || target), nats per token, at least 0."""
    gradient_signal: float | None = None
    """Squared length of the expected gradient; may be negative. None where it is not known."""
    gradient_noise: float | None = None
    """Squared length of the batch's noise."""
    fresh_gradient_noise: float | None = None
    """Squared length of the noise of fresh data."""


def diagnose(log_weights: Vector, tokens: TokenSums) -> BatchDiagnostics:
    """Return the diagnostics of one batch that need no norms.

    log_weights: [B] of trajectories, nats, untruncated.
    tokens: sums over the batch's tokens.
    Raises: ValueError if empty; NonFiniteWeightError for a NaN or +inf, or if every weight is 0.
    """
    return BatchDiagnostics(
        ess_ratio=WeightMoments.of(log_weights).ess_ratio,
        token_ess_ratio=tokens.weights.ess_ratio,
        kl_per_token=tokens.kl_per_token,
    )


def signal_and_noise(
    gradient_norm: float,
    squared_norms: Sequence[float],
    coefficients: Sequence[float],
    log_weights: Sequence[float],
) -> dict[str, float]:
    """Return the fields of `BatchDiagnostics` about the gradient; no signal of one trajectory.

    gradient_norm: of the whole gradient, finite. squared_norms, coefficients: [B] |h_i|^2, k_i.
    log_weights: [B] nats, of the weights that the h_i hold.
    """
    terms = [k * k * square for k, square in zip(coefficients, squared_norms, strict=True)]
    noise, size = math.fsum(terms), len(terms)
    fresh = (x * math.exp(-log) for x, log in zip(terms, log_weights, strict=True) if x > 0.0)
    found = {"gradient_noise": noise, "fresh_gradient_noise": math.fsum(fresh)}
    if size > 1:
        found["gradient_signal"] = (gradient_norm**2 - noise) * size / (size - 1)
    return found


def percentile(ordered: Sequence[_Number], percent: int) -> _Number:
    """Return the value with so many percent of the others below it, the nearest by rank.

    ordered: at least one value, ascending; percent: 0 to 100.
    """
    return ordered[round(percent / 100 * (len(ordered) - 1))]


def k3(log_ratio: float) -> float:
    """Return a token's term of the KL divergence, r - 1 - log r with |log r| <= 20; at least 0."""
    clamped = min(max(log_ratio, -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO)
    return math.expm1(clamped) - clamped


LAG_BUCKETS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Smallest lag of each bucket, in policy versions."""


def lag_breakdown(batch: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the ESS ratio of each bucket that is not empty, by its smallest lag, ascending.

    batch: lag of a trajectory's oldest token, at least 0 versions, and its log importance weight,
        nats, untruncated; -inf is a weight of 0. A bucket without any weight has a ratio of 0.
    Raises: NonFiniteWeightError for a NaN or +inf.
    """
    buckets: dict[int, list[float]] = {}
    for lag, log_weight in batch:
        smallest = max(each for each in LAG_BUCKETS if each <= lag)
        buckets.setdefault(smallest, []).append(log_weight)
    moments = {lag: WeightMoments.of(buckets[lag]) for lag in sorted(buckets)}
    return {
        lag: 0.0 if each.log_sum == -math.inf else each.ess_ratio for lag, each in moments.items()
    }
