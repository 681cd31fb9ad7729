"""Sums over fresh tokens, and what they estimate: the gap between worker and learner.

A token is fresh while the learner still has the version that sampled it. Worker and learner then
have the same parameters, so r = log pi - log mu holds no staleness: only rounding, or a fault.

    gap           mean of |r|, nats per token; grows with entropy and size of the logits
    divergence    mean of exp(r) - 1 - r, nats per token: estimates KL(mu || pi), >= 0 (k3)
    variance      mean of (sum of r over a block)^2 per token, nats^2: what the ESS sees
    scale error   slope of r over log mu. A worker whose temperature is (1 + d) times the learner's
                  has r = d (log mu - E log mu): about d, less what entropies differ between tokens.
                  Rounding has no such slope, however large its gap

Blocks, of about 32 tokens each, say how certain the numbers are. From a pool of at least 8, the
sixteenth with the largest gaps is left out: one broken number in a log-probability makes no fault.

Source of the divergence: Schulman, "Approximating KL divergence" (2020). The rest is this
project's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MIN_FRESH_BLOCKS: Final = 8
"""Number of blocks of fresh tokens below which nothing is judged."""

DEVIATIONS: Final = 3.0
"""Standard errors by which a number must exceed a limit before it is sure to."""

_TRIMMED_SHARE: Final = 1 / 16
"""Share of a pool's blocks, those with the largest gaps, that is left out."""

_FIRST_POSITIONS: Final = 32
"""Blocks that begin below this position in the answer share a bin; the next bins double."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshTokens:
    """Sums over fresh tokens of one block, or of several; r is log pi - log mu, nats."""

    num_blocks: int = 0
    num_tokens: int = 0
    position: int = 0
    """Number of the first token in its answer, from 0; of several blocks, the lowest."""
    absolute_log_ratio: float = 0.0
    """Sum of |r|."""
    log_ratio: float = 0.0
    """Sum of r."""
    square: float = 0.0
    """Sum of r^2."""
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

    @property
    def is_enough(self) -> bool:
        """Whether there are enough blocks to judge by."""
        return self.num_blocks >= MIN_FRESH_BLOCKS

    @property
    def mean_gap(self) -> float:
        """Mean of |r|, nats per token; at least one token is needed."""
        return self.absolute_log_ratio / self.num_tokens

    @property
    def logprob_spread(self) -> float:
        """Sum of (log mu - its mean)^2, nats^2; at least one token is needed."""
        return self.logprob_square - self.logprob**2 / self.num_tokens

    def __add__(self, other: "FreshTokens") -> "FreshTokens":
        """Return the sums over the tokens of both."""
        if not self.num_blocks:
            return other
        return FreshTokens(
            num_blocks=self.num_blocks + other.num_blocks,
            num_tokens=self.num_tokens + other.num_tokens,
            position=min(self.position, other.position),
            absolute_log_ratio=self.absolute_log_ratio + other.absolute_log_ratio,
            log_ratio=self.log_ratio + other.log_ratio,
            square=self.square + other.square,
            divergence=self.divergence + other.divergence,
            largest=max(self.largest, other.largest),
            logprob=self.logprob + other.logprob,
            logprob_square=self.logprob_square + other.logprob_square,
            logprob_log_ratio=self.logprob_log_ratio + other.logprob_log_ratio,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its standard error."""

    value: float
    error: float
    """Standard error, at least 0; inf if one block or none leaves it unknown."""

    @property
    def least(self) -> float:
        """What the number is sure to be at least."""
        return self.value - DEVIATIONS * self.error if self.value < math.inf else self.value

    @property
    def least_size(self) -> float:
        """What the number is sure to be away from 0 at least."""
        return max(0.0, abs(self.value) - DEVIATIONS * self.error)


def without_largest_gaps(blocks: Sequence[FreshTokens]) -> list[FreshTokens]:
    """Return a pool's blocks without those of the largest gaps, if there are enough of them."""
    if len(blocks) < MIN_FRESH_BLOCKS:
        return list(blocks)
    kept = sorted(blocks, key=lambda block: block.mean_gap)
    return kept[: len(kept) - math.ceil(_TRIMMED_SHARE * len(kept))]


def gap_of(blocks: Sequence[FreshTokens]) -> Estimate:
    """Return the mean of |r| over blocks, nats per token; at least one block is needed."""
    total = sum(blocks, FreshTokens())
    mean = total.mean_gap
    if len(blocks) < 2 or not math.isfinite(mean):
        return Estimate(value=mean, error=math.inf)
    rests = [each.absolute_log_ratio - mean * each.num_tokens for each in blocks]
    return Estimate(value=mean, error=_error(rests, total.num_tokens))


def variance_of(blocks: Sequence[FreshTokens]) -> Estimate:
    """Return the variance per token of a block's log ratio, nats^2, as the ESS sees it.

    At least one block is needed. Where a few blocks have nearly all of it, the error is as large.
    """
    total = sum(blocks, FreshTokens())
    squares = [each.log_ratio**2 for each in blocks]
    value = math.fsum(squares) / total.num_tokens
    if len(blocks) < 2 or not math.isfinite(value):
        return Estimate(value=value, error=math.inf)
    rests = [square - value * each.num_tokens for square, each in zip(squares, blocks, strict=True)]
    return Estimate(value=value, error=_error(rests, total.num_tokens))


def scale_error_of(blocks: Sequence[FreshTokens]) -> Estimate | None:
    """Return the slope of r over log mu, with an error that blocks of unequal spread do not bend.

    None if all log mu are the same, or a ratio is not finite.
    """
    total = sum(blocks, FreshTokens())
    if len(blocks) < 2 or not math.isfinite(total.square):
        return None
    x, r = total.logprob / total.num_tokens, total.log_ratio / total.num_tokens
    spread = total.logprob_spread
    if not spread > 1e-9 * total.logprob_square:
        return None
    slope = (total.logprob_log_ratio - total.num_tokens * x * r) / spread
    rests = []
    for each in blocks:
        product = each.logprob_log_ratio - x * each.log_ratio - r * each.logprob
        square = each.logprob_square - 2 * x * each.logprob + each.num_tokens * x * x
        rests.append(product + each.num_tokens * x * r - slope * square)
    return Estimate(value=slope, error=_error(rests, spread))


def gap_quantile(blocks: Sequence[FreshTokens], share: float) -> float:
    """Return the value below which a share of all |r| lies, as the largest of each block show it.

    Of n independent tokens all are below it with probability share^n.
    """
    if not blocks:
        return 0.0
    ordered = sorted(each.largest for each in blocks)
    length = sum(each.num_tokens for each in blocks) / len(blocks)
    return ordered[min(int(share**length * len(ordered)), len(ordered) - 1)]


def position_bin(position: int) -> int:
    """Return the first position of the bin: 0, 32, 64, 128, 256 and so on."""
    return 0 if position < _FIRST_POSITIONS else 1 << (position.bit_length() - 1)


def lower_median(values: Sequence[float]) -> float:
    """Return the lower median, where NaN counts as the largest; at least one value is needed.

    Up to a half of the values, whatever they are, cannot raise it above the largest other one.
    """
    ordered = sorted(values, key=lambda value: math.inf if math.isnan(value) else value)
    return ordered[(len(ordered) - 1) // 2]


def _error(rests: Sequence[float], scale: float) -> float:
    """Standard error of a ratio of sums, from what each block adds to its numerator."""
    count = len(rests)
    return math.sqrt(math.fsum(rest * rest for rest in rests) * count / (count - 1)) / scale
