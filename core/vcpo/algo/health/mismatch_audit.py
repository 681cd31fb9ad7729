"""Audit after every start: do rollout engine and learner compute the same policy?

A token is fresh while the learner still has the version that sampled it. Both sides then have the
same parameters, and their log-probabilities of the token differ by rounding alone. A wrong model
revision, tokenizer, prompt format, temperature or number format causes a much larger gap. Training
would treat that gap as staleness: the steps shrink, nothing fails, and the run is worthless.

The measure is the mean over a worker's tokens of |log pi - log mu|, nats, and of these the lower
median over workers: one worker with a fault of its own does not end the run. The expected gap
depends on the number formats of both sides. Each limit lies between the expected gap and that of a
mistake:

    float32 on both sides  5e-7 measured, 1e-3 with TF32; bfloat16 by mistake gives 4e-3 to 9e-3
    bfloat16               about 1e-2; a temperature of 0.9 for 1.0 gives 0.04
    quantized or noisy     0.005 (int8), 0.02 (fp8), 0.08 (noise of 0.05); another model gives > 1

Source: the audit of Jet-RL, arXiv 2601.14243 (gap of log-probabilities at lag 0); the limits are
this project's, of models below 30 M parameters (`tests/integration/test_rollout_numerics.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class MismatchClass(StrEnum):
    """Number formats of rollout engine and learner, as the run sets them."""

    EXACT = "exact"
    """Both compute in float32."""
    ROUNDED = "rounded"
    """At least one computes in bfloat16."""
    QUANTIZED_OR_NOISY = "quantizedOrNoisy"
    """The weights of the rollout engine are quantized or noisy."""


MISMATCH_LIMITS_NATS = {
    MismatchClass.EXACT: 2e-3,
    MismatchClass.ROUNDED: 0.03,
    MismatchClass.QUANTIZED_OR_NOISY: 0.3,
}
"""Largest expected mean gap, nats per token, by class."""

MIN_FRESH_BLOCKS = 8
"""Number of blocks of fresh tokens below which the audit has no result."""


class MismatchError(RuntimeError):
    """Rollout engine and learner do not compute the same policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshTokens:
    """Sums over tokens that the learner scored with the version that sampled them."""

    num_blocks: int = 0
    """Number of blocks, each of about `calibration.FRESH_BLOCK_TOKENS` tokens."""
    num_tokens: int = 0
    absolute_log_ratio: float = 0.0
    """Sum over tokens of |log pi - log mu|, nats."""

    @property
    def is_enough(self) -> bool:
        """Whether there are enough blocks for an audit."""
        return self.num_blocks >= MIN_FRESH_BLOCKS

    @property
    def mean_gap(self) -> float:
        """Mean of |log pi - log mu|, nats per token; at least one token is needed."""
        return self.absolute_log_ratio / self.num_tokens

    def __add__(self, other: "FreshTokens") -> "FreshTokens":
        """Return the sums over the tokens of both."""
        return FreshTokens(
            num_blocks=self.num_blocks + other.num_blocks,
            num_tokens=self.num_tokens + other.num_tokens,
            absolute_log_ratio=self.absolute_log_ratio + other.absolute_log_ratio,
        )


def audit_mismatch(
    fresh: Mapping[str, FreshTokens], limit_nats: float, *, num_awaited: int = 0
) -> float | None:
    """Return the gap of the median worker, nats per token; None if it is too early to tell.

    It is if there are too few fresh tokens, or if workers that have yet to come may show that those
    with a gap are the exception.

    fresh: by worker.
    num_awaited: workers that have yet to come, at least 0.
    Raises: MismatchError naming the settings to compare if the gap exceeds the limit or is NaN.
    """
    total = sum(fresh.values(), FreshTokens())
    if not total.is_enough:
        return None
    gaps = sorted((each.mean_gap for each in fresh.values()), key=_nan_last)
    gap = gaps[(len(gaps) - 1) // 2]
    if not gap <= limit_nats:
        place = (len(gaps) + num_awaited - 1) // 2 - num_awaited  # if those to come have none
        if place < 0 or gaps[place] <= limit_nats:
            return None
        raise MismatchError(
            f"rollout engine and learner differ by {gap:.3g} nats per token on {total.num_tokens}"
            f" fresh tokens; at most {limit_nats:g} is expected: they do not compute the same"
            " policy. Compare the model's revision, the tokenizer, the temperature, and"
            " `precision`, `quantization` and `noise` of the rollout groups. If the gap is"
            " intended, raise `learner.maxMismatchNats`"
        )
    return gap


def _nan_last(gap: float) -> float:
    return math.inf if math.isnan(gap) else gap
