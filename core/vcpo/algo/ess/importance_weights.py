r"""Importance weights of trajectories, and the effective sample size of a batch of weights.

The behavior policy mu sampled a trajectory with trained tokens y_1..y_L. The target policy pi is
trained on it. The importance weight is a product over the trained tokens only:

    w = prod_t pi(y_t) / mu(y_t),        log w = sum_t [log pi(y_t) - log mu(y_t)].

A batch of B weights is worth ESS trajectories of equal weight (Kish's effective sample size). The
ESS ratio rho is the effective share of the batch:

    ESS = (sum_i w_i)^2 / sum_i w_i^2,    rho = ESS / B = exp(2 LSE(log w) - LSE(2 log w)) / B.

It is 1 if and only if all weights are equal, and 1/B if one trajectory has all the weight. A factor
on all weights does not change it, so the code uses u_i = w_i / max_j w_j: neither sum can overflow
or vanish.

rho is computed from the weights before truncation and before any mask, because truncation hides the
spread that rho measures: (1, 1/2, 2, 4) has rho = 0.662, and rho = 0.818 when truncated at 2. The
gradient uses the truncated weight min(w, c), which bounds its variance at the price of some bias.

Sources: VCPO, arXiv 2602.17616 (ESS of untruncated sequence weights; truncation with c = 8);
Kish, Survey Sampling (1965) (the effective sample size).

Departures from the released reference: it exponentiates in float32, so one weight that overflows
makes the ESS NaN, and the step is taken at the full rate. Here such a weight has a value, and an
input that is NaN raises. The release adds an epsilon of 1e-8 to sum_i w_i^2, so weights that are
all small (by 16 nats) look like a collapse. Here nothing depends on the scale of the weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from vcpo.algo.arrays import Vector, vector

LARGEST_LOG_RATIO: Final = 20.0
"""Nats at which the log ratio of one token is clamped, so that one token cannot fill a mean."""


class NonFiniteWeightError(ValueError):
    """A number that a step depends on is NaN or infinite; the step must not be taken.

    name: name of the argument with that number.
    index: position of the number in the argument; None if the argument is a single number.
    value: the number.
    """

    def __init__(self, name: str, index: int | None, value: float) -> None:
        super().__init__(name, index, value)
        self.name = name
        self.index = index
        self.value = value

    def __str__(self) -> str:
        place = self.name if self.index is None else f"{self.name}[{self.index}]"
        return f"{place} is {self.value}: skip this step and look at the trajectory it came from"


def require_log_weights(log_weights: Sequence[float], name: str = "log_weights") -> None:
    """Check that there is a log weight and that none is NaN or +inf; -inf is a weight of 0.

    Raises: ValueError if empty; NonFiniteWeightError for the first NaN or +inf.
    """
    if not log_weights:
        raise ValueError(f"{name} is empty: at least one trajectory is needed")
    for index, value in enumerate(log_weights):
        if math.isnan(value) or value == math.inf:
            raise NonFiniteWeightError(name, index, value)


def log_sum_exp(values: Vector) -> float:
    """Return the logarithm of the sum of the exponentials, for values of any size.

    values: [n] log-domain numbers below +inf; -inf stands for 0.
    Returns -inf if every value is -inf.
    Raises: ValueError if empty; NonFiniteWeightError for a NaN or +inf.
    Identity: log sum exp(v) = m + log sum exp(v - m) with m = max v, where no term exceeds 1.
    """
    values = vector(values, "values")
    require_log_weights(values, "values")
    largest = max(values)
    if largest == -math.inf:
        return largest
    return largest + math.log(math.fsum(math.exp(value - largest) for value in values))


def effective_sample_size(log_weights: Vector) -> float:
    """Return the effective sample size: the number of equal weights that these are worth.

    log_weights: [B] nats, one per trajectory of the optimizer step over all ranks, untruncated.
    Returns a value in [1, B]; exactly B if all weights are equal.
    Raises: ValueError if empty; NonFiniteWeightError for a NaN or +inf, or with index 0 if every
    weight is 0.
    Source: Kish (1965); VCPO, arXiv 2602.17616, step scaling by effective sample size.
    """
    log_weights = vector(log_weights, "log_weights")
    require_log_weights(log_weights)
    largest = max(log_weights)
    if largest == -math.inf:
        raise NonFiniteWeightError("log_weights", 0, largest)
    shares = [math.exp(log_weight - largest) for log_weight in log_weights]
    size = math.fsum(shares) ** 2 / math.fsum(share * share for share in shares)
    return min(max(size, 1.0), float(len(shares)))


def ess_ratio(log_weights: Vector) -> float:
    """Return the effective share of the batch, rho = ESS / B.

    log_weights: [B] nats, one per trajectory of the optimizer step over all ranks, untruncated.
    Returns a value in [1/B, 1]; exactly 1 if all weights are equal.
    Raises: as `effective_sample_size`.
    Source: VCPO, arXiv 2602.17616, step scaling by effective sample size.
    """
    log_weights = vector(log_weights, "log_weights")
    return effective_sample_size(log_weights) / len(log_weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMoments:
    """Number of weights, their sum and the sum of their squares, in log space.

    They determine the ESS, exp(2 log S1 - log S2), so that of half a million tokens needs no list.
    """

    count: int

    log_sum: float
    """Log of the sum of the weights, nats; -inf if every weight is 0."""

    log_sum_squares: float
    """Log of the sum of the squared weights, nats; -inf if every weight is 0."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count is {self.count}: give at least 1")
        for name in ("log_sum", "log_sum_squares"):
            value = getattr(self, name)
            if math.isnan(value) or value == math.inf:
                raise NonFiniteWeightError(name, None, value)

    @classmethod
    def of(cls, log_weights: Vector) -> Self:
        """Return the moments of the weights with these logarithms.

        log_weights: [n] nats; -inf is a weight of 0.
        Raises: ValueError if empty; NonFiniteWeightError for a NaN or +inf.
        """
        log_weights = vector(log_weights, "log_weights")
        require_log_weights(log_weights)
        return cls(
            count=len(log_weights),
            log_sum=log_sum_exp(log_weights),
            log_sum_squares=log_sum_exp([2.0 * each for each in log_weights]),
        )

    @property
    def ess(self) -> float:
        """Effective sample size, in [1, n].

        Raises: NonFiniteWeightError if every weight is 0.
        Source: Kish, Survey Sampling (1965).
        """
        if self.log_sum == -math.inf:
            raise NonFiniteWeightError("log_sum", None, self.log_sum)
        return min(max(math.exp(2.0 * self.log_sum - self.log_sum_squares), 1.0), self.count)

    @property
    def ess_ratio(self) -> float:
        """Effective share of the weights, ESS / n, in [1/n, 1].

        Raises: NonFiniteWeightError if every weight is 0.
        """
        return self.ess / self.count
