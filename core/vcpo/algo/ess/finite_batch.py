r"""Mean and scatter of the on-policy ESS ratio of a batch of N weights.

`calibration` predicts rho_on, the ratio of an infinite batch. A batch of N weights shows another
ratio. Most batches lack the rare huge weight, and their ratio is too high. A batch that contains
one has a ratio far too low. With log-normal weights of mean 1, log w ~ N(-v / 2, v),

    log rho = log rho_on + bias + noise,    log rho_on = -v.

An expansion around the means needs the fourth moment of w, e^6v, which a batch near v = 1 does not
show. Both numbers are therefore simulated with batches drawn from a fixed seed. N is the number of
weights of a batch, v is their -log rho_on. Up to 8,192 weights the bias has a standard error of 2 %
of v at most.

Source: Owen, Monte Carlo theory, methods and examples, ch. 9 (2013), on the variance of the
effective sample size and its overestimation for skewed weights. The numbers are this project's.
"""

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any, Final, SupportsInt

from vcpo.algo.arrays import Scalar

_SMALL: Final = 512
"""Batches of at most so many weights share 65,536 draws: 128 batches of 512, 1,024 of 64."""

_DRAWS: Final = 1 << 20
"""Weights drawn for a law of larger batches: 512 of 2,048, 128 of 8,192."""

_MOST_WEIGHTS: Final = 8192
"""Largest batch that is simulated. Larger ones follow by 1/N and 1/sqrt(N), which is right for v up
to 1; at v = 4 a batch of 32,768 has a bias of 0.30, and this says 0.12."""

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


def nats_at_size(
    nats: Scalar, num_weights: SupportsInt, other_size: SupportsInt, mismatch_nats: Scalar = 0.0
) -> float:
    """Return what batches of another size, without mismatch, miss of the same drift.

    Small batches miss less of the same weights, because most of them lack the rare large one; so do
    batches with mismatch, whose weights have more of both. The drift is the variance v that
    explains the mean: with v_on of the mismatch, b of `bias`,

        nats = (v_on + v - b(v_on + v)) - (v_on - b(v_on)),        v - b(v) at the other size.

    nats: mean of log rho_on - log rho, finite; at or below 0, which is chance, it is returned.
    num_weights, other_size: N of the batches that were read, and of the others, at least 1.
    mismatch_nats: v_on of the batches that were read, at least 0.
    """
    nats, mismatch = float(nats), min(float(mismatch_nats), _MOST_NATS)
    if nats <= 0.0 or (int(num_weights) == int(other_size) and mismatch == 0.0):
        return nats
    start = finite_batch_law(mismatch, num_weights).bias
    high = _MOST_NATS - mismatch
    low = min(nats, high)
    for _ in range(_BISECTIONS):
        drift = 0.5 * (low + high)
        unseen = finite_batch_law(mismatch + drift, num_weights).bias - start
        low, high = (drift, high) if drift - unseen < nats else (low, drift)
    return low - finite_batch_law(low, other_size).bias


@cache
def _simulate_law(variance: float, size: int) -> FiniteBatchLaw:
    import numpy as np  # learners have it, and nobody else draws

    draws = _normals(_SMALL if size <= _SMALL else _MOST_WEIGHTS)
    batches = draws[: len(draws) // size * size].reshape(-1, size)
    weights = np.exp(math.sqrt(variance) * batches)
    squares = np.square(weights).sum(axis=1)
    ratios = 2.0 * np.log(weights.sum(axis=1)) - np.log(size * squares)
    bias = max(0.0, float(ratios.mean()) + variance)
    return FiniteBatchLaw(bias=bias, deviation=float(ratios.std()))


@cache
def _normals(most_weights: int) -> Any:
    import numpy as np

    if most_weights == _SMALL:
        return np.array(NormalDist().samples(1 << 16, seed=602))
    return np.random.RandomState(602).standard_normal(_DRAWS)
