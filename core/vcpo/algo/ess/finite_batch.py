r"""Mean and scatter of the on-policy ESS ratio of a batch of N weights.

`calibration` predicts rho_on, the ratio of an infinite batch. A batch of N weights shows another
ratio. Most batches lack the rare huge weight, and their ratio is too high. A batch that contains
one has a ratio far too low. With log-normal weights of mean 1, log w ~ N(-v / 2, v),

    log rho = log rho_on + bias + noise,    log rho_on = -v.

For small v both follow from an expansion of log rho = 2 log mean w - log mean w^2 around the means:

    bias -> v / N,    deviation -> sqrt((e^4v - 4 e^2v + 4 e^v - 1) / N) -> v sqrt(2 / N),

but for v near 1 the fourth moment in it, e^6v, needs more weights than a batch has: at v = 1 and
N = 16 the expansion says 1.4, while batches scatter by 0.3, because rho stays in [1/N, 1]. Both
numbers are therefore simulated with batches drawn from a fixed seed. N is the number of weights of
a batch, v is their -log rho_on.

Source: Owen, Monte Carlo theory, methods and examples, ch. 9 (2013), on the variance of the
effective sample size and its overestimation for skewed weights. The numbers are this project's.
"""

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, pstdev
from typing import Final, SupportsInt

from vcpo.algo.arrays import Scalar

_DRAWS: Final = 1 << 16
"""Weights drawn for one law: 128 batches of 512, 1,024 of 64."""

_MOST_WEIGHTS: Final = 512
"""Largest batch that is simulated; larger batches follow by 1/N and 1/sqrt(N)."""

_MOST_NATS: Final = 16.0
"""Variance above which every batch is at its floor 1/N."""

_GRID: Final = 8
"""Simulated laws per factor of 2 in the variance; between them the numbers scale linearly."""

_SIZE_GRID: Final = 4
"""Simulated laws per factor of 2 in the number of weights."""

_BISECTIONS: Final = 20
"""Halvings of the variances that a mean may have come from; they leave 2e-5 nats^2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FiniteBatchLaw:
    """Law of the log ESS ratio of an on-policy batch, relative to an infinite batch."""

    bias: float
    """Mean of log rho - log rho_on over batches, nats, at least 0."""

    deviation: float
    """Standard deviation of log rho over batches, nats."""


EXACT: Final = FiniteBatchLaw(bias=0.0, deviation=0.0)
"""The law of weights that are all 1."""


def finite_batch_law(variance: Scalar, num_weights: SupportsInt) -> FiniteBatchLaw:
    """Return the law of the ESS ratio of an on-policy batch.

    variance: v of each log weight, nats^2, at least 0; for unequal variances -log rho_on.
    num_weights: N, at least 1.
    """
    variance, num_weights = float(variance), int(num_weights)
    if not variance >= 0.0 or num_weights < 1:
        raise ValueError(
            f"variance is {variance} and num_weights {num_weights}: give at least 0 and 1"
        )
    if variance < 1e-12:
        return EXACT
    variance = min(variance, _MOST_NATS)
    near = math.exp2(round(math.log2(variance) * _GRID) / _GRID)
    log_size = math.log2(min(num_weights, _MOST_WEIGHTS))
    size = round(math.exp2(round(log_size * _SIZE_GRID) / _SIZE_GRID))
    law, growth = _simulate_law(near, size), max(1.0, num_weights / size)
    return FiniteBatchLaw(
        bias=law.bias * variance / near / growth,
        deviation=law.deviation * variance / near / math.sqrt(growth),
    )


def nats_at_size(nats: Scalar, num_weights: SupportsInt, other_size: SupportsInt) -> float:
    """Return what batches of another size miss on average where batches of this size miss `nats`.

    Small batches miss less of the same weights, because most of them lack the rare large one. Where
    the mean is at the floor of its size, log N, the variance is read as 16 nats^2.

    nats: mean of -log rho, finite; at or below 0, which is chance, every size reads the same.
    num_weights, other_size: N of the batches that were read, and of the others, at least 1.
    """
    nats = float(nats)
    if nats <= 0.0 or int(num_weights) == int(other_size):
        return nats
    low, high = min(nats, _MOST_NATS), _MOST_NATS
    for _ in range(_BISECTIONS):
        variance = 0.5 * (low + high)
        reads_less = variance - finite_batch_law(variance, num_weights).bias < nats
        low, high = (variance, high) if reads_less else (low, variance)
    return low - finite_batch_law(low, other_size).bias


@cache
def _simulate_law(variance: float, size: int) -> FiniteBatchLaw:
    deviation, normals = math.sqrt(variance), _normals()
    ratios = []
    for start in range(0, _DRAWS - size + 1, size):
        weights = [math.exp(deviation * each) for each in normals[start : start + size]]
        total = math.fsum(weights)
        ratios.append(2 * math.log(total) - math.log(size * math.fsum(w * w for w in weights)))
    return FiniteBatchLaw(bias=max(0.0, fmean(ratios) + variance), deviation=pstdev(ratios))


@cache
def _normals() -> tuple[float, ...]:
    return tuple(NormalDist().samples(_DRAWS, seed=602))
