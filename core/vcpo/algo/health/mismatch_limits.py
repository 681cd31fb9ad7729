"""What rounding explains of the gap between a worker and the learner.

The size of rounding is not one of the number format alone: bfloat16 gives a mean gap of 0.004 nats
on a tiny model and 0.03 on one of 135 M parameters, because it grows with the logits and with the
entropy. So it is measured: the learner scores the same tokens in its own precision and in that of
the workers. Both computations are right, so their difference is rounding.

    gap           at most twice the measured one: the kernels of an engine round at other places
    variance      of a log ratio, at most the square of that
    scale error   at most `_LARGEST_SCALE_ERROR` beyond what the measured one surely is

A gap below `NEGLIGIBLE_NATS` is no fault, whatever was measured. A policy that is nearly sure of
each token has gaps of 1e-4 nats that differ from kernel to kernel by more than twice, and a slope.

If both sides compute in float32, what is measured is bfloat16 against float32, and an eighth of it
is explained: TF32, which a GPU may use for float32, keeps three bits more.

Quantization and noise are no rounding, and a model that is cut over ranks can be scored in one
precision only. For them there are limits by number format, of the largest gaps measured so far.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vcpo.algo.ess.calibration import MISMATCH_CEILING
from vcpo.algo.health.fresh_tokens import FreshTokens, gap_of, scale_error_of, without_largest_gaps


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
"""Largest mean gap where rounding cannot be measured, nats per token, by class. 1e-3 was seen with
TF32, 0.037 with bfloat16, 0.02 with fp8 and 0.08 with noise of 0.05."""

_MARGIN: Final = 2.0
"""Factor on the measured gap."""

NEGLIGIBLE_NATS: Final = 1e-3
"""Mean gap, nats per token, that harms nothing: the ESS ratio of 1,000 tokens is exp(-0.004)."""

_TF32: Final = 1 / 8
"""Rounding of TF32 over that of bfloat16: 10 bits of a fraction instead of 7."""

_LARGEST_SCALE_ERROR: Final = 4e-3
"""Slope that an engine may have beyond the measured one."""

_VARIANCE_PER_SQUARED_GAP: Final = 4.0
"""Variance of a token's log ratio over its squared mean size. 1.6 for a normal law; 2 to 6.5 were
measured, because most tokens agree and a few do not."""

NEGLIGIBLE_VARIANCE: Final = _VARIANCE_PER_SQUARED_GAP * NEGLIGIBLE_NATS**2
"""Variance of a log ratio per token, nats^2, that harms nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchLimits:
    """What is explained; more is a fault of a worker or of the engines."""

    gap_nats: float
    """Mean of |r|, nats per token, above 0."""
    variance: float
    """Variance of a log ratio per token, nats^2, above 0; at most `MISMATCH_CEILING`."""
    scale_error: float | None = None
    """Slope of r over log mu, either sign; None where none is judged."""
    is_current: bool = True
    """Whether it is of tokens of this step, or given. One of long ago warns and refuses nothing:
    entropy and logits may have grown since."""

    @property
    def is_measured(self) -> bool:
        """Whether they follow from rounding, and not from a setting or number formats."""
        return self.scale_error is not None

    @classmethod
    def of_gap(cls, gap_nats: float) -> "MismatchLimits":
        """Return the limits of a run that sets its gap, or whose rounding cannot be measured."""
        variance = min(_VARIANCE_PER_SQUARED_GAP * gap_nats**2, MISMATCH_CEILING)
        return cls(gap_nats=gap_nats, variance=variance)

    @classmethod
    def of_rounding(
        cls, blocks: Sequence[FreshTokens], formats: MismatchClass
    ) -> "MismatchLimits | None":
        """Return the limits that follow from the same tokens in both precisions.

        blocks: of the log ratios between the precisions, cut as fresh tokens are; in `EXACT` those
            between bfloat16 and float32.
        Returns None if they say nothing: there are none, or they differ by nothing or by no number.
        """
        kept = without_largest_gaps(blocks)
        total = sum(kept, FreshTokens())
        if not kept or not 0.0 < total.square < math.inf:
            return None
        share = _MARGIN * (_TF32 if formats is MismatchClass.EXACT else 1.0)
        variance = max(share**2 * total.square / total.num_tokens, NEGLIGIBLE_VARIANCE)
        slope = scale_error_of(kept)
        return cls(
            gap_nats=max(share * gap_of(kept).value, NEGLIGIBLE_NATS),
            variance=min(variance, MISMATCH_CEILING),
            scale_error=_LARGEST_SCALE_ERROR + (0.0 if slope is None else slope.least_size),
        )
