r"""Diagnostics of one batch: numbers to monitor, none of which decides anything.

ESS ratios are given for trajectories and for tokens, before truncation, which hides the spread (see
`ess.importance_weights`).

KL divergence is k3, the mean over tokens of r - 1 - log r with r = pi / mu. It is unbiased, because
the mean of r is 1, and never negative. Log ratios are clamped to +-20 nats, so that one token
cannot dominate the mean.

The share of the gradient that the top 1 % of trajectories have is computed from norms: a trajectory
contributes k_i g_i with norm |k_i| h_i, and its share is |k_i| h_i / sum_j |k_j| h_j. Squared norms
would give the share of the variance, which is more extreme and says nothing more.

Sources: Kish, Survey Sampling (1965) (ESS); Schulman, http://joschu.net/blog/kl-approx.html (k3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from vcpo.algo.arrays import Vector, vector
from vcpo.algo.ess.importance_weights import LARGEST_LOG_RATIO
from vcpo.algo.ess.moments import WeightMoments

_Number = TypeVar("_Number", int, float)

TOP_SHARE = 0.01
"""Share of the trajectories, rounded up, whose part of the gradient is reported."""


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
    top_gradient_share: float | None
    """Share of the gradient, by norm, that the top 1 % of trajectories have; None without norms."""


def diagnose(
    log_weights: Vector,
    tokens: TokenSums,
    *,
    gradient_norms: Vector | None = None,
    coefficients: Vector | None = None,
) -> BatchDiagnostics:
    """Return the diagnostics of one batch.

    log_weights: [B] of trajectories, nats, untruncated.
    tokens: sums over the batch's tokens.
    gradient_norms: [B] h_i, at least 0; coefficients: [B] k_i; None if unknown.
    Raises: ValueError if empty, if lengths differ, or if a number is out of range;
    NonFiniteWeightError for a NaN or +inf, or if every weight is 0.
    """
    log_weights = vector(log_weights, "log_weights")
    norms = None if gradient_norms is None else vector(gradient_norms, "gradient_norms")
    factors = None if coefficients is None else vector(coefficients, "coefficients")
    return BatchDiagnostics(
        ess_ratio=WeightMoments.of(log_weights).ess_ratio,
        token_ess_ratio=tokens.weights.ess_ratio,
        kl_per_token=tokens.kl_per_token,
        top_gradient_share=top_gradient_share(norms, factors),
    )


def percentile(ordered: Sequence[_Number], percent: int) -> _Number:
    """Return the value with so many percent of the others below it, the nearest by rank.

    ordered: at least one value, ascending; percent: 0 to 100.
    """
    return ordered[round(percent / 100 * (len(ordered) - 1))]


def k3(log_ratio: float) -> float:
    """Return a token's term of the KL divergence, r - 1 - log r with |log r| <= 20; at least 0."""
    clamped = min(max(log_ratio, -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO)
    return math.expm1(clamped) - clamped


def top_gradient_share(
    gradient_norms: Sequence[float] | None, coefficients: Sequence[float] | None
) -> float | None:
    """Return the share of sum_j |k_j| h_j that the largest 1 % of its terms have.

    At least one term counts as the largest 1 %.
    Returns a value in (0, 1]; 0.0 if there is no gradient; None if an argument is None.
    """
    if gradient_norms is None or coefficients is None:
        return None
    if len(gradient_norms) != len(coefficients):
        raise ValueError(
            f"gradient_norms has {len(gradient_norms)} entries and coefficients "
            f"{len(coefficients)}: give one of each per trajectory"
        )
    pairs = zip(gradient_norms, coefficients, strict=True)
    terms = sorted((abs(factor) * norm for norm, factor in pairs), reverse=True)
    total = math.fsum(terms)
    return math.fsum(terms[: math.ceil(TOP_SHARE * len(terms))]) / total if total > 0.0 else 0.0
