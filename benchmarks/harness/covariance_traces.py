"""Traces of covariance of several estimators of one vector, compared on the same samples.

Only inner products are needed: between the estimates of one sample, and between their sums over
blocks of samples. So vectors of any length need not be kept.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCKS = 32
T_QUANTILE = 2.0395
"""0.975 quantile of Student's t with BLOCKS - 1 degrees of freedom."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """Inner products of E estimators, by block of equally many samples."""

    samples_per_block: int
    within: Array
    """[blocks, E, E] sum over the block's samples of <g_e, g_f>."""
    between: Array
    """[blocks, blocks, E, E] <sum of one block's g_e, sum of the other's g_f>."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traces:
    """Traces of the covariance of one sample's estimate, [E] in every field."""

    raw: Array
    mean_scale: Array
    """Projection of the estimator's mean on the reference's, in units of that; may be noise."""

    @property
    def at_equal_mean(self) -> Array:
        """Traces after every mean is scaled to the length of the reference's mean."""
        return self.raw / self.mean_scale**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A positive number and its 95 % interval."""

    value: float
    low: float
    high: float


def moments(blocks: Iterable[npt.NDArray[np.floating]]) -> Moments:
    """Moments of blocks [samples, E, length], of which one at a time is held.

    Products are as exact as the blocks' number type; all sums are float64.
    """
    within, sums, size = [], [], 0
    for block in blocks:
        size = len(block)
        within.append((block @ block.swapaxes(1, 2)).sum(axis=0, dtype=np.float64))
        sums.append(block.sum(axis=0, dtype=np.float64))
    num_estimators = len(sums[0])
    flat = np.concatenate(sums)
    products = (flat @ flat.T).reshape(len(sums), num_estimators, len(sums), num_estimators)
    return Moments(
        samples_per_block=size, within=np.stack(within), between=products.transpose(0, 2, 1, 3)
    )


def traces(of: Moments, blocks: Sequence[int], reference: int) -> Traces:
    """Traces over the N samples of some blocks; both kinds of product are unbiased.

    trace = (sum ||g||^2 - ||sum g||^2 / N) / (N - 1). Means are multiplied by pairs of different
    samples, <E g_e, E g_f> = (<sum g_e, sum g_f> - sum <g_e, g_f>) / (N (N - 1)), since the norm
    of an average is lengthened by its noise.
    blocks: positions of blocks, with at least two samples in them together.
    reference: position of the estimator whose mean the others are measured by.
    """
    count = of.samples_per_block * len(blocks)
    within = of.within[list(blocks)].sum(axis=0)
    total = of.between[np.ix_(blocks, blocks)].sum(axis=(0, 1))
    means = (total - within) / (count * (count - 1))
    return Traces(
        raw=np.diag(within - total / count) / (count - 1),
        mean_scale=means[:, reference] / means[reference, reference],
    )


def jackknife(figure: Callable[[Sequence[int]], float]) -> Ratio:
    """A positive figure of blocks with its interval, symmetric in the logarithm.

    figure: of positions among BLOCKS blocks; it is asked for all, and for all but each one.
    """
    value = math.log(figure(range(BLOCKS)))
    rest = [[block for block in range(BLOCKS) if block != left_out] for left_out in range(BLOCKS)]
    logs = [math.log(figure(kept)) for kept in rest]
    error = math.sqrt((BLOCKS - 1) * float(np.var(logs)))
    low, high = (math.exp(value + sign * T_QUANTILE * error) for sign in (-1.0, 1.0))
    return Ratio(value=math.exp(value), low=low, high=high)
