r"""Coverage: how much of the policy's probability stale data shows.

A policy that drifts puts probability on responses that the behavior policy hardly ever samples. As
E_mu[w] is the sum of pi(y) over all y that mu may sample, the mean weight of a batch falls below 1
by the probability of what mu practically never samples.

The gradient has truncated weights min(w, c), whose mean is below 1 on policy too, because the
mismatch of the two engines spreads them. With log w of the normal distribution N(-v/2, v) it is

    m_0(v) = Phi((log c - v/2) / sqrt v) + c Phi(-(log c + v/2) / sqrt v),

with Phi the normal distribution function. The coverage is the mean of min(w, c) over a batch, as a
part of the mean of m_0, at most 1.

Source: this project's. The log-normal model of the mismatch is that of `ess.calibration`.
"""

import math
from typing import Final

from vcpo.algo.arrays import Scalar, Vector, vector
from vcpo.algo.ess.importance_weights import require_log_weights

_SQRT_2: Final = math.sqrt(2.0)
_LEAST_MEAN: Final = 1e-300
"""Smallest mean that is divided by; it takes the place of a mean that underflows."""


def policy_coverage(log_weights: Vector, cap: Scalar, on_policy_mean: Scalar = 1.0) -> float:
    """Return the share of the policy's probability that a batch shows, in [0, 1].

    log_weights: [n] nats, untruncated; -inf is a weight of 0.
    cap: c, the largest weight of the gradient, positive and finite.
    on_policy_mean: mean of the truncated weights that the mismatch alone leaves, in (0, 1].
    Raises: ValueError if log_weights is empty, or a number is out of its range;
    NonFiniteWeightError for a log weight that is NaN or +inf.
    """
    log_weights = vector(log_weights, "log_weights")
    cap, on_policy_mean = float(cap), float(on_policy_mean)
    require_log_weights(log_weights)
    if not 0.0 < cap < math.inf:
        raise ValueError(f"cap is {cap}: give a finite weight above 0")
    if not 0.0 < on_policy_mean <= 1.0:
        raise ValueError(f"on_policy_mean is {on_policy_mean}: give a mean weight in (0, 1]")
    log_cap = math.log(cap)
    truncated = [math.exp(min(each, log_cap)) for each in log_weights]
    return min(1.0, math.fsum(truncated) / len(truncated) / on_policy_mean)


def on_policy_mean_weight(variances: Vector, cap: Scalar) -> float:
    """Return the expected mean of the truncated weights of an on-policy batch, in (0, 1].

    variances: [n] v of each trajectory's log weight, nats^2, finite and at least 0.
    cap: as for `policy_coverage`, at least 1.
    """
    variances, cap = vector(variances, "variances"), float(cap)
    means = [_truncated_mean(variance, math.log(cap)) for variance in variances]
    return min(1.0, max(math.fsum(means) / len(means), _LEAST_MEAN))


def _truncated_mean(variance: float, log_cap: float) -> float:
    """Return m_0(v); log_cap: log c, at least 0."""
    if variance == 0.0:
        return 1.0
    deviation = math.sqrt(variance)
    below = _normal_share((log_cap - variance / 2.0) / deviation)
    above = _normal_share(-(log_cap + variance / 2.0) / deviation)
    return below + math.exp(log_cap) * above


def _normal_share(quantile: float) -> float:
    return math.erfc(-quantile / _SQRT_2) / 2.0
