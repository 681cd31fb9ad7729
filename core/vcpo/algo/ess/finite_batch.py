r"""What the ESS ratio of a batch of N weights shows on policy: where it lies, and how it scatters.

`calibration` predicts rho_on, the ratio of a batch without end. N weights show another one. The
rare huge weight is missing from most batches, so that their ratio is too high; when it is there,
their ratio is far too low. With log-normal weights of mean 1, log w ~ N(-v / 2, v),

    log rho = log rho_on + bias + noise,    log rho_on = -v.

For small v both follow from an expansion of log rho = 2 log mean w - log mean w^2 around the means:

    bias -> v / N,    deviation -> sqrt((e^4v - 4 e^2v + 4 e^v - 1) / N) -> v sqrt(2 / N),

but the fourth moment in it, e^6v, needs more weights than a batch has as soon as v is near 1: at
v = 1 and N = 16 the expansion says 1.4 where batches scatter by 0.3, as rho cannot leave [1/N, 1].
So both numbers are found by drawing batches, the same ones in every process. N is a batch's number
of weights, v their -log rho_on.

Source: Owen, Monte Carlo theory, methods and examples, ch. 9 (2013), on the variance of the
effective sample size, and on why it is estimated too large when weights are skewed. The numbers are
this project's.
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
"""Weights of a batch that are drawn; larger batches follow by 1/N and 1/sqrt(N)."""

_MOST_NATS: Final = 16.0
"""Variance beyond which every batch is at its floor."""

_GRID: Final = 8
"""Laws drawn for each factor of 2 in the variance; between them the numbers scale with it."""

_SIZE_GRID: Final = 4
"""Laws drawn for each factor of 2 in the number of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FiniteBatchLaw:
    """How the log ESS ratio of a batch lies to that of a batch without end, on policy."""

    bias: float
    """Mean of log rho - log rho_on over batches, nats, at least 0."""

    deviation: float
    """Standard deviation of log rho, nats."""


EXACT: Final = FiniteBatchLaw(bias=0.0, deviation=0.0)
"""Of weights that are all 1."""


def finite_batch_law(variance: Scalar, num_weights: SupportsInt) -> FiniteBatchLaw:
    """Law of a batch's ESS ratio on policy.

    variance: of each log weight, nats^2, at least 0; for unequal ones -log rho_on of them all.
    num_weights: N, at least 1.
    Raises: ValueError when a number is out of range.
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
    size = _drawn_size(min(num_weights, _MOST_WEIGHTS))
    drawn, growth = _drawn(near, size), max(1.0, num_weights / size)
    return FiniteBatchLaw(
        bias=drawn.bias * variance / near / growth,
        deviation=drawn.deviation * variance / near / math.sqrt(growth),
    )


def _drawn_size(num_weights: int) -> int:
    """A number of weights near this one, out of few."""
    return round(math.exp2(round(math.log2(num_weights) * _SIZE_GRID) / _SIZE_GRID))


@cache
def _drawn(variance: float, size: int) -> FiniteBatchLaw:
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
