"""Fresh tokens: blocks of them, and what they say of the gap between worker and learner.

A token is fresh while the learner still has the version that sampled it. Worker and learner then
have the same parameters, so r = log pi - log mu holds no staleness: only rounding, or a fault.

    gap           mean of |r|, nats per token; grows with entropy and size of the logits
    divergence    mean of exp(r) - 1 - r, nats per token: estimates KL(mu || pi), >= 0 (k3)
    scale error   slope of r over log mu. A worker whose temperature is (1 + d) times the learner's
                  has r = d (log mu - E log mu): about d, less what entropies differ between tokens.
                  Rounding has no such slope, however large its gap

Source of the divergence: Schulman, "Approximating KL divergence" (2020). The rest is this
project's.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

FRESH_BLOCK_TOKENS: Final = 32
"""Tokens of a block: enough for a sum to be nearly normal, few enough for many blocks."""

MIN_FRESH_BLOCKS: Final = 8
"""Number of blocks below which a worker is not known."""

DEVIATIONS: Final = 3.0
"""Standard errors by which a number must exceed a limit before it is sure to."""

_TRIMMED_SHARE: Final = 1 / 16
"""Share of a pool's blocks, those with the largest gaps, that is left out: one broken number in a
log-probability makes no fault."""

_FIRST_POSITIONS: Final = 32
"""Blocks that begin below this position in the answer share a bin; the next bins double."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshBlock:
    """Sums over a run of fresh tokens of one answer; r is log pi - log mu, nats."""

    num_tokens: int
    """At least 1, about `FRESH_BLOCK_TOKENS`."""
    log_ratio: float
    """Sum of r, the log weight of the block; below +inf and not NaN."""
    worker: str = ""
    """The worker that sampled it; empty if there is one."""
    position: int = 0
    """Number of the first token in its answer, from 0."""
    absolute_log_ratio: float = 0.0
    """Sum of |r|."""
    divergence: float = 0.0
    """Sum of exp(r) - 1 - r."""
    largest: float = 0.0
    """Largest |r|."""
    logprob: float = 0.0
    """Sum of log mu."""
    logprob_square: float = 0.0
    """Sum of (log mu)^2."""
    logprob_log_ratio: float = 0.0
    """Sum of r log mu."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or not self.log_ratio < math.inf:
            raise ValueError(
                f"num_tokens is {self.num_tokens} and log_ratio {self.log_ratio}: give at least 1"
                " and a number below infinity"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its standard error."""

    value: float
    error: float
    """Standard error, at least 0; inf if one block leaves it unknown."""

    @property
    def least(self) -> float:
        return self.value - DEVIATIONS * self.error if self.value < math.inf else self.value


def by_worker(blocks: Iterable[FreshBlock]) -> dict[str, list[FreshBlock]]:
    """Return the blocks of each worker, in this order."""
    found: dict[str, list[FreshBlock]] = {}
    for block in blocks:
        found.setdefault(block.worker, []).append(block)
    return found


def without_largest_gaps(blocks: Sequence[FreshBlock]) -> list[FreshBlock]:
    """Return a pool's blocks without those of the largest gaps, if there are enough of them."""
    if len(blocks) < MIN_FRESH_BLOCKS:
        return list(blocks)
    kept = sorted(blocks, key=lambda block: block.absolute_log_ratio / block.num_tokens)
    return kept[: len(kept) - math.ceil(_TRIMMED_SHARE * len(kept))]


def gap_of(blocks: Sequence[FreshBlock]) -> Estimate:
    """Return the mean of |r| over blocks, nats per token; at least one block is needed."""
    num_tokens = sum(each.num_tokens for each in blocks)
    mean = sum(each.absolute_log_ratio for each in blocks) / num_tokens
    if len(blocks) < 2 or not math.isfinite(mean):
        return Estimate(value=mean, error=math.inf)
    rests = [each.absolute_log_ratio - mean * each.num_tokens for each in blocks]
    return Estimate(value=mean, error=_error(rests, num_tokens))


def divergence_of(blocks: Sequence[FreshBlock]) -> float:
    """Return KL(mu || pi), nats per token; at least one block is needed."""
    return sum(each.divergence for each in blocks) / sum(each.num_tokens for each in blocks)


def scale_error_of(blocks: Sequence[FreshBlock]) -> float | None:
    """Return the slope of r over log mu; None if all log mu are the same, or r is not finite."""
    count = sum(each.num_tokens for each in blocks)
    x = sum(each.logprob for each in blocks)
    r = sum(each.log_ratio for each in blocks)
    squares = sum(each.logprob_square for each in blocks)
    spread = squares - x * x / count
    if not math.isfinite(r) or not spread > 1e-9 * squares:
        return None
    return (sum(each.logprob_log_ratio for each in blocks) - x * r / count) / spread


def gap_quantile(blocks: Sequence[FreshBlock], share: float) -> float:
    """Return the value below which a share of all |r| lies, as the largest of each block show it.

    Of n independent tokens all are below it with probability share^n. At least one block is needed.
    """
    ordered = sorted(each.largest for each in blocks)
    length = sum(each.num_tokens for each in blocks) / len(blocks)
    return ordered[min(int(share**length * len(ordered)), len(ordered) - 1)]


def gap_by_position(blocks: Iterable[FreshBlock]) -> dict[int, float]:
    """Return the mean of |r| by the position at which a bin begins: 0, 32, 64, 128 and so on."""
    bins: dict[int, list[FreshBlock]] = {}
    for block in blocks:
        at = block.position
        first = 0 if at < _FIRST_POSITIONS else 1 << (at.bit_length() - 1)
        bins.setdefault(first, []).append(block)
    return {first: gap_of(bins[first]).value for first in sorted(bins)}


def lower_median(values: Sequence[float]) -> float:
    """Return the lower median, where NaN counts as the largest; at least one value is needed.

    Up to a half of the values, whatever they are, cannot raise it above the largest other one.
    """
    ordered = sorted(values, key=lambda value: math.inf if math.isnan(value) else value)
    return ordered[(len(ordered) - 1) // 2]


def _error(rests: Sequence[float], scale: float) -> float:
    count = len(rests)
    return math.sqrt(math.fsum(rest * rest for rest in rests) * count / (count - 1)) / scale
