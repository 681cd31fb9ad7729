"""Do sampler and learner compute the same policy? Asked of fresh tokens, after every start.

While the learner has the version that sampled a token, both hold the same parameters, and what
they say of it differs by rounding alone. A wrong model revision, tokenizer, prompt format or
temperature, or a number format that nobody asked for, differs by much more, and would be trained on
as if it were staleness: steps shrink, nothing fails, and the run is worthless.

The measure is the mean over tokens of |log pi - log mu|, nats. What is to be expected depends on
how the two compute, so the limit lies between what that costs and what a mistake costs:

    float32 both        5e-7 measured, 1e-3 with TF32; bfloat16 by mistake costs 4e-3 to 9e-3
    bfloat16            about 1e-2; a temperature of 0.9 for 1.0 costs 0.04
    quantized or noisy  0.005 (int8), 0.02 (fp8), 0.08 (noise of 0.05); another model costs nats

Source: the audit of Jet-RL, arXiv 2601.14243 (gap of log-probabilities at lag 0); the limits are
this project's, of models below 30 M parameters (`tests/integration/test_rollout_numerics.py`).
"""

from dataclasses import dataclass
from enum import StrEnum


class MismatchClass(StrEnum):
    """How sampler and learner compute, as far as a run asks for it."""

    EXACT = "exact"
    """Both in float32."""
    ROUNDED = "rounded"
    """At least one of them in bfloat16."""
    QUANTIZED_OR_NOISY = "quantizedOrNoisy"
    """The sampler's weights are quantized or noisy."""


MISMATCH_LIMITS_NATS = {
    MismatchClass.EXACT: 2e-3,
    MismatchClass.ROUNDED: 0.03,
    MismatchClass.QUANTIZED_OR_NOISY: 0.3,
}
"""Largest mean gap per token that a class explains."""

MIN_FRESH_BLOCKS = 8
"""Fewer pieces of fresh tokens than this settle nothing."""


class MismatchError(RuntimeError):
    """Sampler and learner do not compute the same policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshTokens:
    """Tokens that the learner scored with the version that sampled them."""

    num_blocks: int = 0
    """Stretches that they come in, of `calibration.FRESH_BLOCK_TOKENS` or so."""
    num_tokens: int = 0
    absolute_log_ratio: float = 0.0
    """Sum over tokens of |log pi - log mu|, nats."""

    @property
    def is_enough(self) -> bool:
        """Whether they settle anything."""
        return self.num_blocks >= MIN_FRESH_BLOCKS

    def __add__(self, other: "FreshTokens") -> "FreshTokens":
        """The tokens of both; each was scored with the version that sampled it."""
        return FreshTokens(
            num_blocks=self.num_blocks + other.num_blocks,
            num_tokens=self.num_tokens + other.num_tokens,
            absolute_log_ratio=self.absolute_log_ratio + other.absolute_log_ratio,
        )


def audit_mismatch(fresh: FreshTokens, limit_nats: float) -> float | None:
    """Mean gap per token of fresh tokens, nats; None when there are too few.

    Raises: MismatchError, with what to look at, when the gap is above the limit or no number.
    """
    if not fresh.is_enough:
        return None
    gap = fresh.absolute_log_ratio / fresh.num_tokens
    if not gap <= limit_nats:
        raise MismatchError(
            f"sampler and learner differ by {gap:.3g} nats per token on {fresh.num_tokens} fresh"
            f" tokens, at most {limit_nats:g} is to be expected: they do not compute the same"
            " policy. Compare the model's revision, the tokenizer, the temperature, and"
            " `precision`, `quantization` and `noise` of the rollout groups; if the gap is meant to"
            " be, raise `learner.maxMismatchNats`"
        )
    return gap
