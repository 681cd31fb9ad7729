r"""The on-policy ESS ratio, estimated from fresh tokens during a run.

Training and inference engines disagree a little on every token. With a mismatch of variance s2 per
token, and E[w] = 1 because w is a ratio of probabilities,

    log w | L ~ N(-s2 L / 2, s2 L),    L = number of trained tokens.

Prediction. E[w^2 | L] = exp(s2 L), so a batch of lengths L_1..L_B has rho_on = B / sum_i exp(s2
L_i), at least 1/B: with s2 = 6.5e-4, typical of bf16, 0.68 at 600 tokens and 0.006 at 8,000.

Estimate of one worker. For x_i = log w_i the likelihood of s2 has its maximum at

    s2 = 2 (sqrt(1 + A Q) - 1) / A,    A = mean L_i,  Q = mean x_i^2 / L_i,

with a relative standard error of sqrt(2 / n) at most. Each x_i is first clipped to 3 deviations of
its own law, whose scale is winsorized: outliers of a sixteenth of the blocks do not move it. The
newest 64, 256, .. blocks count, as far as their intervals intersect: the mismatch may change.

docs/inside/mathematics.md says how the estimate of the run follows from those of its workers.

Sources: VCPO, arXiv 2602.17616, Eq. 5 (rho_on as a given constant); Goldenshluger and Nemirovski,
"On spatially adaptive estimation of nonparametric regression" (1997), for how far back to look.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from statistics import median
from typing import Final, Self

from vcpo.algo.arrays import Vector, counts
from vcpo.algo.ess.importance_weights import log_sum_exp
from vcpo.algo.health.fresh_tokens import MIN_FRESH_BLOCKS, FreshBlock, by_worker

MISMATCH_CEILING: Final = 1e-2
"""Largest s2 that counts as mismatch, nats^2 per token; more is a fault of the engines.

bfloat16 has 6.5e-4 to 2e-3, fp8 1.7e-3, noise of 0.01 on normalization weights 9e-4, and a mixture
of experts without router replay about twice a dense model. A temperature of 0.7 for 1 has 3e-2."""

WINDOW_BLOCKS: Final = 4096
"""Newest blocks that are kept of all workers together, or 32 for each worker if that is more."""

_BLOCKS_PER_WORKER: Final = 32

PRECISE_COUNT: Final = 2048
"""Number of blocks that is enough: it gives a standard error of 3 %."""

_UPKEEP_COUNT: Final = 128
"""Blocks per step that keep a precise estimate current."""

_FIRST_REACH: Final = 64
"""Newest blocks of a worker that count in any case."""

_CLIP: Final = 3.0
"""Standard deviations to which a log weight is clipped."""

_EXTREME_SHARE: Final = 1 / 16
"""Share of the blocks, the most extreme ones, that is winsorized before the scale is taken."""

_CONFIDENCE: Final = 2.0
"""Half width of the intervals that must intersect, in standard errors."""

_AGREEMENT: Final = 2.0
"""Standard errors, its own or the quartile's, by which a worker may lie above the quartile and be
pooled."""

STALE_STEPS: Final = 32
"""Steps without fresh blocks in which the variance of the estimate doubles; it then counts as
stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchEstimate:
    """What fresh blocks say of the mismatch."""

    variance_per_token: float
    """s2, nats^2 per token, at least 0; before any ceiling."""
    count: int
    """Number of blocks that it is the mean of, at least 1."""

    @property
    def relative_error(self) -> float:
        return math.sqrt(2.0 / self.count)

    def at(self, deviations: float) -> float:
        return self.variance_per_token * (1.0 + deviations * self.relative_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchCalibration:
    """The newest fresh blocks of a run, and the mismatch that they show; immutable."""

    ceiling: float = MISMATCH_CEILING
    """Largest s2 that counts as mismatch, nats^2 per token, above 0. More is not calibrated
    away."""

    blocks: tuple[FreshBlock, ...] = ()
    """The window, oldest first."""

    estimate: MismatchEstimate | None = None
    """Estimate of the last step whose window had one; None before the first such step."""

    age_steps: int = 0
    """Optimizer steps since the last fresh block, or since the start; at least 0."""

    def observe(self, blocks: Sequence[FreshBlock]) -> Self:
        """Return the calibration after one more step with these fresh blocks; none: it ages."""
        if not blocks:
            return replace(self, age_steps=self.age_steps + 1)
        names = {each.worker for each in chain(self.blocks, blocks)}
        most = max(_BLOCKS_PER_WORKER, PRECISE_COUNT // len(names))
        kept = (*self.blocks, *chain.from_iterable(_thinned(blocks, most)))
        size = max(WINDOW_BLOCKS, _BLOCKS_PER_WORKER * len(names))
        return self._with(kept[-size:], age_steps=0)

    def without(self, workers: Collection[str]) -> Self:
        if not workers:
            return self
        rest = tuple(each for each in self.blocks if each.worker not in workers)
        return self._with(rest, age_steps=self.age_steps)

    @property
    def variance_per_token(self) -> float | None:
        """Estimate of s2, nats^2 per token, up to `ceiling`; None before there is one."""
        if self.estimate is None:
            return None
        return min(self.estimate.variance_per_token, self.ceiling)

    @property
    def relative_error(self) -> float:
        """Standard error of s2 over s2, in [0, 1]; 0 before there is an estimate."""
        if self.estimate is None:
            return 0.0
        doublings = min(self.age_steps / STALE_STEPS, math.log2(self.estimate.count))
        return min(1.0, math.sqrt(2.0**doublings) * self.estimate.relative_error)

    @property
    def wanted_count(self) -> int:
        pooled = 0 if self.estimate is None else self.estimate.count
        return max(PRECISE_COUNT - pooled, _UPKEEP_COUNT)

    def on_policy_ess_ratio(self, num_tokens: Vector) -> float:
        """Return the expected ESS ratio of an on-policy batch, B / sum_i exp(s2 L_i).

        num_tokens: [B] trained tokens of each trajectory, at least 0.
        Returns a value in [1/B, 1]; 1.0 before there is an estimate.
        """
        num_tokens = counts(num_tokens, "num_tokens")
        if not num_tokens or min(num_tokens) < 0:
            raise ValueError(f"num_tokens is {num_tokens}: give one or more lengths of at least 0")
        variance_per_token = self.variance_per_token
        if variance_per_token is None:
            return 1.0
        size = len(num_tokens)
        log_sum = log_sum_exp([variance_per_token * length for length in num_tokens])
        return min(max(math.exp(math.log(size) - log_sum), 1.0 / size), 1.0)

    def _with(self, blocks: tuple[FreshBlock, ...], *, age_steps: int) -> Self:
        estimate = run_estimate(blocks) or self.estimate
        return replace(self, blocks=blocks, estimate=estimate, age_steps=age_steps)


def _thinned(blocks: Sequence[FreshBlock], most: int) -> Iterator[Sequence[FreshBlock]]:
    for each in by_worker(blocks).values():
        yield each[:: math.ceil(len(each) / most)]


def run_estimate(blocks: Sequence[FreshBlock]) -> MismatchEstimate | None:
    """Return what the workers of a window agree on; None if too few blocks have a known worker.

    blocks: oldest first.
    """
    known, unknown = [], 0
    for each in by_worker(block for block in blocks if block.log_ratio > -math.inf).values():
        if len(each) < MIN_FRESH_BLOCKS:
            unknown += len(each)
        else:
            known.append((worker_estimate(each), len(each)))
    if not known or 3 * unknown >= sum(weight for _, weight in known):
        return None
    known.sort(key=lambda one: one[0].variance_per_token)
    estimates = [found for found, _ in known]
    # A worker whose newest blocks alone count, by a change or by chance, has a smaller say.
    usual = median(each.count for each in estimates)
    says = [min(1.0, each.count / usual) for each in estimates]
    typical = min(
        _quartile(
            estimates, [say * weight for say, (_, weight) in zip(says, known, strict=True)], unknown
        ),
        _quartile(estimates, says),
        key=lambda one: one.variance_per_token,
    )
    agreeing = [
        each
        for each in estimates
        if each.variance_per_token
        <= typical.variance_per_token
        * (1.0 + _AGREEMENT * max(each.relative_error, typical.relative_error))
    ]
    count = sum(each.count for each in agreeing)
    total = math.fsum(each.count * each.variance_per_token for each in agreeing)
    return MismatchEstimate(variance_per_token=total / count, count=count)


def _quartile(
    estimates: Sequence[MismatchEstimate], weights: Sequence[float], num_unknown: int = 0
) -> MismatchEstimate:
    """Return the lower quartile of estimates, lowest first, above so many without mismatch."""
    reached = accumulate(weights, initial=num_unknown)
    next(reached)
    quarter = (num_unknown + sum(weights)) / 4.0
    rows = zip(estimates, reached, strict=True)
    return next(each for each, below in rows if below >= quarter)


def worker_estimate(blocks: Sequence[FreshBlock]) -> MismatchEstimate:
    """Return what the newest blocks show, of the longest reach that agrees with shorter ones.

    blocks: oldest first, at least one, with finite log ratios.
    """
    chosen = _estimate(blocks[-_FIRST_REACH:])
    low, high = 0.0, math.inf
    reach = _FIRST_REACH
    while reach < len(blocks):
        reach *= 4
        found = _estimate(blocks[-reach:])
        low, high = max(low, chosen.at(-_CONFIDENCE)), min(high, chosen.at(_CONFIDENCE))
        if found.at(-_CONFIDENCE) > high or found.at(_CONFIDENCE) < low:
            break
        chosen = found
    return chosen


def _estimate(blocks: Sequence[FreshBlock]) -> MismatchEstimate:
    """Return the estimate of all these blocks, each clipped to its own law."""
    length = sum(each.num_tokens for each in blocks) / len(blocks)
    squares = sorted(each.log_ratio**2 / each.num_tokens for each in blocks)
    num_kept = len(squares) - math.ceil(_EXTREME_SHARE * len(squares)) or len(squares)
    total = sum(squares[:num_kept]) + (len(squares) - num_kept) * squares[num_kept - 1]
    for _ in range(2):  # the second time to a scale that rare large blocks have raised
        scale, total = _variance(total / len(blocks), length), 0.0
        for each in blocks:
            variance = scale * each.num_tokens
            reach = _CLIP * math.sqrt(variance)
            clipped = min(max(each.log_ratio, -variance / 2 - reach), -variance / 2 + reach)
            total += clipped * clipped / each.num_tokens
    return MismatchEstimate(
        variance_per_token=_variance(total / len(blocks), length), count=len(blocks)
    )


def _variance(mean_square: float, length: float) -> float:
    # The likeliest s2, with sqrt(1 + AQ) - 1 as AQ / (sqrt(1 + AQ) + 1): exact for a tiny AQ.
    return 2.0 * mean_square / (math.sqrt(1.0 + length * mean_square) + 1.0)
