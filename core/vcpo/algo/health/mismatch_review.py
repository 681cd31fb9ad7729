"""Do workers and learner compute the same policy? Read after every step from the newest blocks.

Training would treat a gap between the two as staleness, or calibrate it away: nothing fails, and
the run is worthless. There is one limit on the mean gap, which the run sets, or else its number
formats. The run is read by the lower median of its workers: fewer than half of them, whatever they
send, neither hide a fault of the others nor make one.

    a worker is at fault     its gap is surely ten times that of the median worker: it is set aside
    the engines disagree     the gap of the median worker is above the limit

Source: the audit of Jet-RL, arXiv 2601.14243 (gap of log-probabilities at lag 0).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from vcpo.algo.ess.calibration import MISMATCH_CEILING
from vcpo.algo.health.fresh_tokens import (
    MIN_FRESH_BLOCKS,
    Estimate,
    FreshBlock,
    by_worker,
    divergence_of,
    gap_by_position,
    gap_of,
    gap_quantile,
    lower_median,
    scale_error_of,
    without_largest_gaps,
)

REVIEWED_BLOCKS: Final = 64
"""Newest blocks of a worker by which it is read."""

FAULT_RATIO: Final = 10.0
"""Gap of a worker over that of the median worker from which it is set aside."""

NEGLIGIBLE_NATS: Final = 1e-3
"""Mean gap, nats per token, that is no fault of a worker: the ESS ratio of 1,000 tokens is
exp(-0.004)."""

_VARIANCE_PER_SQUARED_GAP: Final = 4.0
"""Variance of a token's log ratio over its squared mean size. 1.6 for a normal law; 2 to 6.5 were
measured, because most tokens agree and a few do not."""

_GROWTH: Final = 2.0
"""Gap of late tokens over that of early ones from which it grows with the position."""

_SCALE_ERROR: Final = 0.02
"""Slope of log ratios over log mu that is more than rounding has."""


class MismatchClass(StrEnum):
    """Number formats of rollout engine and learner, as the run sets them."""

    EXACT = "exact"
    """Both compute in float32."""
    ROUNDED = "rounded"
    """One of them computes in bfloat16, or both do."""
    QUANTIZED_OR_NOISY = "quantizedOrNoisy"
    """The weights of the rollout engine are quantized or noisy."""


MISMATCH_LIMITS_NATS: Final = {
    MismatchClass.EXACT: 2e-3,
    MismatchClass.ROUNDED: 0.075,
    MismatchClass.QUANTIZED_OR_NOISY: 0.3,
}
"""Largest mean gap of each class, nats per token: twice the largest that was measured. 1e-3 was
seen with TF32, 0.037 with bfloat16, 0.02 with fp8 and 0.08 with noise of 0.05."""


class MismatchError(RuntimeError):
    """Rollout engine and learner do not compute the same policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchFault:
    """A worker whose log-probabilities are not those of the policy that it samples from."""

    worker: str
    gap_nats: float
    """Mean of |r|, nats per token."""
    usual_nats: float
    """Gap of the median worker."""

    @property
    def message(self) -> str:
        """What the worker did and what to look at, as a clause."""
        return (
            f"it differs from the learner by {self.gap_nats:.3g} nats per token, and the median"
            f" worker by {self.usual_nats:.2g}; compare its temperature, its precision, its"
            " quantization and its masked logits with those of the other workers"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchReview:
    """What the newest fresh blocks say; the numbers are those of the median worker."""

    limit_nats: float = math.inf
    gaps: Mapping[str, Estimate] = field(default_factory=dict)
    """Mean of |r| of each worker, nats per token; empty while there are too few blocks."""
    gap_p99_nats: float | None = None
    divergence_nats: float | None = None
    """KL(mu || pi), nats per token."""
    scale_error: float | None = None
    gap_by_position: Mapping[int, float] = field(default_factory=dict)
    """Mean of |r| over the blocks of all workers, by the position at which a bin begins."""
    is_exceeded: bool = False
    """Whether the median worker is above the limit."""
    at_fault: tuple[MismatchFault, ...] = ()

    @property
    def gap_nats(self) -> float | None:
        return lower_median([each.value for each in self.gaps.values()]) if self.gaps else None

    @property
    def message(self) -> str:
        """How far workers and learner differ and what to look at, in a sentence."""
        return (
            f"rollout engine and learner differ by {self.gap_nats or 0.0:.3g} nats per token; at"
            f" most {self.limit_nats:.3g} is expected. They do not compute the same policy:"
            f" {self._advice}"
        )

    @property
    def _advice(self) -> str:
        gaps = list(self.gap_by_position.values())
        if len(gaps) >= 2 and not gaps[-1] <= _GROWTH * gaps[0]:
            return (
                "it grows with the position in the answer: compare positions, the scaling of RoPE,"
                " and the cache of keys and values"
            )
        if abs(self.scale_error or 0.0) > _SCALE_ERROR:
            return "it grows with the surprisal of a token: compare the temperature"
        return (
            "it is the same at all positions: compare the model's revision, the tokenizer, the"
            " temperature, `precision`, `quantization` and `noise` of the rollout groups, and state"
            " of the model that is not a parameter"
        )


def review(blocks: Sequence[FreshBlock], limit_nats: float) -> MismatchReview:
    """Return what the newest blocks of each worker say.

    blocks: oldest first. limit_nats: above 0.
    """
    shown = {name: own[-REVIEWED_BLOCKS:] for name, own in by_worker(blocks).items()}
    if sum(map(len, shown.values())) < MIN_FRESH_BLOCKS:
        return MismatchReview(limit_nats=limit_nats)
    pools = {name: without_largest_gaps(own) for name, own in shown.items()}
    gaps = {name: gap_of(own) for name, own in pools.items()}
    usual = lower_median([each.value for each in gaps.values()])
    fault_nats = max(FAULT_RATIO * usual, NEGLIGIBLE_NATS)
    slopes = [slope for own in pools.values() if (slope := scale_error_of(own)) is not None]
    slopes.sort(key=abs)
    return MismatchReview(
        limit_nats=limit_nats,
        gaps=gaps,
        gap_p99_nats=lower_median([gap_quantile(own, 0.99) for own in shown.values()]),
        divergence_nats=lower_median([divergence_of(own) for own in pools.values()]),
        scale_error=slopes[(len(slopes) - 1) // 2] if slopes else None,
        gap_by_position=gap_by_position(block for own in pools.values() for block in own),
        is_exceeded=not usual <= limit_nats,  # also of NaN
        at_fault=tuple(
            MismatchFault(worker=name, gap_nats=gap.value, usual_nats=usual)
            for name, gap in gaps.items()
            if len(shown[name]) >= MIN_FRESH_BLOCKS and not gap.least <= fault_nats
        ),
    )


def largest_variance(limit_nats: float) -> float:
    """Return the s2 that a run with this limit calibrates away at most, nats^2 per token."""
    return min(_VARIANCE_PER_SQUARED_GAP * limit_nats**2, MISMATCH_CEILING)
