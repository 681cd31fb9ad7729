"""Count and sums that determine an ESS.

The ESS of any set of weights follows from three numbers,

    n,    log S1 = LSE(log w),    log S2 = LSE(2 log w),    ESS = exp(2 log S1 - log S2),

so that of half a million tokens needs no list of weights.
"""

import math
from dataclasses import dataclass
from typing import Self

from vcpo.algo.arrays import Vector, vector
from vcpo.algo.ess.importance_weights import NonFiniteWeightError, log_sum_exp, require_log_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMoments:
    """Number of weights, their sum and the sum of their squares, in log space."""

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
