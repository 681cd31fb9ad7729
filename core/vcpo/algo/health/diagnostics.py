r"""What one batch looks like: numbers to watch, none of which decides anything by itself.

ESS ratios are given at two levels, of trajectories and of tokens, before and after truncation at a
cap c. Only the former can warn: truncation hides the spread (see `weights`). chi2 of the weights is
the same knowledge on another scale, chi2 = 1 / rho - 1, and is finite for all weights that way.

KL divergence is k3, mean over tokens of r - 1 - log r with r = pi / mu: unbiased, since the mean of
r is 1, and never negative. Log ratios are held within +-20 nats, as one token may not be the mean.

The share of the gradient that the top 1 % of trajectories have is one of norms: a trajectory
contributes k_i g_i, of norm |k_i| h_i, and its share is |k_i| h_i / sum_j |k_j| h_j. Squares would
be the share of the variance, and look twice as bad on a log scale without saying more.

Sources: Kish, Survey Sampling (1965) (ESS); Schulman, http://joschu.net/blog/kl-approx.html (k3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Self

from vcpo.algo.arrays import Matrix, Vector, matrix, vector
from vcpo.algo.ess.importance_weights import LARGEST_LOG_RATIO, require_log_weights
from vcpo.algo.ess.moments import WeightMoments

TOP_SHARE = 0.01
"""Part of the trajectories, rounded up, whose share of the gradient is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums:
    """What diagnostics keep of token log ratios; sums of parts of a batch are merged."""

    weights: WeightMoments
    """Of the token ratios pi / mu."""

    truncated: WeightMoments
    """Of the token ratios, none above the cap."""

    k3_sum: float
    """Sum over tokens of r - 1 - log r, nats."""

    @classmethod
    def of(cls, log_ratios: Vector, cap: float) -> Self:
        """Sums over tokens.

        log_ratios: [n] log pi - log mu, nats; cap: largest ratio kept, finite and above 0.
        Raises: ValueError when empty or the cap is out of range; NonFiniteWeightError at a NaN or
        +inf.
        """
        log_ratios = vector(log_ratios, "log_ratios")
        return cls(
            weights=WeightMoments.of(log_ratios),
            truncated=WeightMoments.of(truncated_logs(log_ratios, cap)),
            k3_sum=math.fsum(map(k3, log_ratios)),
        )

    @classmethod
    def merge(cls, parts: Sequence["TokenSums"]) -> Self:
        """Sums over the tokens of all parts.

        Raises: ValueError when there is no part.
        """
        return cls(
            weights=WeightMoments.merge([part.weights for part in parts]),
            truncated=WeightMoments.merge([part.truncated for part in parts]),
            k3_sum=math.fsum(part.k3_sum for part in parts),
        )

    @property
    def kl_per_token(self) -> float:
        """KL(mu || pi), nats per token, at least 0."""
        return self.k3_sum / self.weights.count


@dataclass(frozen=True, slots=True, kw_only=True)
class NormStatistics:
    """How the norms of the trajectories' gradients are spread."""

    mean: float
    median: float
    largest: float
    variation: float
    """Standard deviation over mean; 0 when all are equal or 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDiagnostics:
    """Numbers of one batch, to be looked at."""

    ess_ratio: float
    """Of trajectories, before truncation, in [1/B, 1]."""
    truncated_ess_ratio: float
    """Of trajectories, after it."""
    token_ess_ratio: float
    """Of tokens, before truncation."""
    truncated_token_ess_ratio: float
    """Of tokens, after it."""
    chi2: float
    """chi-square divergence between learner and sampler, by trajectories, in [0, B - 1]."""
    token_chi2: float
    """The same by tokens."""
    kl_per_token: float
    """KL divergence from sampler to learner, nats per token."""
    log_weight_max: float
    """Largest log importance weight of a trajectory, nats."""
    top_gradient_share: float | None
    """Part of the gradient, by norm, that the top 1 % of trajectories have; None without norms."""
    baseline_shift_mean: float
    """Mean over groups of the baseline minus the mean reward; 0 for the group mean itself."""
    baseline_shift_max: float
    """Largest size of that difference over groups."""
    norms: NormStatistics | None
    """Of the trajectories' gradients, unweighted; None when they were not measured."""


def diagnose(
    log_weights: Vector,
    tokens: TokenSums,
    advantages: Matrix,
    *,
    cap: float,
    gradient_norms: Vector | None = None,
    coefficients: Vector | None = None,
) -> BatchDiagnostics:
    """Numbers of one batch.

    log_weights: [B] nats, untruncated, of trajectories.
    tokens: sums over the batch's tokens.
    advantages: [groups][n_g] reward minus baseline, by the trajectories that share a baseline.
    cap: weight at which the gradient truncates, finite and above 0.
    gradient_norms: [B] h_i, at least 0; coefficients: [B] k_i; None when there are none.
    Raises: ValueError when empty, of unequal lengths or out of range; NonFiniteWeightError at a NaN
    or +inf, or when every weight is 0.
    """
    log_weights = vector(log_weights, "log_weights")
    norms = None if gradient_norms is None else vector(gradient_norms, "gradient_norms")
    factors = None if coefficients is None else vector(coefficients, "coefficients")
    whole = WeightMoments.of(log_weights)
    shifts = [-fmean(group) for group in matrix(advantages, "advantages")]
    return BatchDiagnostics(
        ess_ratio=whole.ess_ratio,
        truncated_ess_ratio=WeightMoments.of(truncated_logs(log_weights, cap)).ess_ratio,
        token_ess_ratio=tokens.weights.ess_ratio,
        truncated_token_ess_ratio=tokens.truncated.ess_ratio,
        chi2=1.0 / whole.ess_ratio - 1.0,
        token_chi2=1.0 / tokens.weights.ess_ratio - 1.0,
        kl_per_token=tokens.kl_per_token,
        log_weight_max=max(log_weights),
        top_gradient_share=top_gradient_share(norms, factors),
        baseline_shift_mean=fmean(shifts),
        baseline_shift_max=max(map(abs, shifts)),
        norms=None if norms is None else norm_statistics(norms),
    )


def k3(log_ratio: float) -> float:
    """Share of one token in the divergence, r - 1 - log r with log r within +-20; at least 0."""
    held = min(max(log_ratio, -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO)
    return math.expm1(held) - held


def truncated_logs(log_weights: Sequence[float], cap: float) -> list[float]:
    """Logarithms of min(w, cap).

    Raises: ValueError when the cap is out of range; NonFiniteWeightError at a NaN or +inf, which
    would fit under the cap, but no policy gives it.
    """
    if not 0.0 < cap < math.inf:
        raise ValueError(f"cap is {cap}: give a finite weight above 0, such as 8.0")
    require_log_weights(log_weights)
    return [min(each, math.log(cap)) for each in log_weights]


def top_gradient_share(
    gradient_norms: Sequence[float] | None, coefficients: Sequence[float] | None
) -> float | None:
    """Part of sum_j |k_j| h_j that the largest 1 % of its terms, at least one, have.

    Returns a value in (0, 1]; 0.0 when there is no gradient, None when either is not known.
    Raises: ValueError when the lengths differ.
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


def norm_statistics(gradient_norms: Sequence[float]) -> NormStatistics:
    """How these norms are spread.

    Raises: ValueError when empty.
    """
    if not gradient_norms:
        raise ValueError("gradient_norms is empty: at least one trajectory is needed")
    mean = fmean(gradient_norms)
    return NormStatistics(
        mean=mean,
        median=median(gradient_norms),
        largest=max(gradient_norms),
        variation=pstdev(gradient_norms) / mean if mean > 0.0 else 0.0,
    )
