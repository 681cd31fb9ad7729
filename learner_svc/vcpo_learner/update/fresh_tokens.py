"""Fresh tokens: the learner scored them with the version that sampled them.

Their log ratios contain no staleness, only the mismatch of the two engines. A trajectory may be
fresh in part: after a change of version during its generation, its last tokens are fresh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo.algo import FRESH_BLOCK_TOKENS, FreshTokens, MismatchCalibration, near_equal_blocks
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.estimator.record import segment_sums

LARGEST_FRESH_SHARE = 0.25
"""Part of a batch's tokens that may be scored beside it for calibration: without a backward pass,
they cost about a tenth of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshBlocks:
    """Blocks of fresh tokens, as `MismatchCalibration.observe` takes them."""

    log_weights: tuple[float, ...] = ()
    """Sum of each block's log ratios, nats; below +inf and not NaN."""
    num_tokens: tuple[int, ...] = ()
    """Tokens of each block, at least 1."""
    absolute_log_ratio: float = 0.0
    """Sum over all tokens of |log pi - log mu|, nats."""

    @property
    def tokens(self) -> FreshTokens:
        """The counts that the start-up check takes."""
        return FreshTokens(
            num_blocks=len(self.num_tokens),
            num_tokens=sum(self.num_tokens),
            absolute_log_ratio=self.absolute_log_ratio,
        )

    def join(self, other: FreshBlocks) -> FreshBlocks:
        """Return the blocks of both."""
        return FreshBlocks(
            log_weights=self.log_weights + other.log_weights,
            num_tokens=self.num_tokens + other.num_tokens,
            absolute_log_ratio=self.absolute_log_ratio + other.absolute_log_ratio,
        )


def fresh_blocks(
    trajectories: Sequence[Trajectory], log_ratios: Tensor, policy_version: int
) -> FreshBlocks:
    """Return the tokens that a version sampled, cut into blocks.

    log_ratios: [N] float64 log pi - log mu of the trained tokens, nats, one trajectory after
        another; pi is that version.
    A stretch whose sum is NaN or +inf says nothing about engines that work, and is left out.
    """
    stretches = list(_stretches(trajectories, policy_version))
    if not stretches:
        return FreshBlocks()
    parts = [log_ratios[start:end] for start, end in stretches]
    totals: list[float] = _sums(parts, [len(part) for part in parts]).tolist()
    parts = [part for part, total in zip(parts, totals, strict=True) if total < math.inf]
    if not parts:
        return FreshBlocks()
    sizes = [size for part in parts for size in near_equal_blocks(len(part), FRESH_BLOCK_TOKENS)]
    return FreshBlocks(
        log_weights=tuple(_sums(parts, sizes).tolist()),
        num_tokens=tuple(sizes),
        absolute_log_ratio=float(torch.cat(parts).abs().sum()),
    )


def wanted_fresh_tokens(
    calibration: MismatchCalibration, batch_tokens: int, *, num_blocks: int = 0
) -> int:
    """Return the number of fresh tokens to score beside a batch with this many fresh blocks."""
    missing = max(0, calibration.wanted_count - num_blocks)
    return min(missing * FRESH_BLOCK_TOKENS, math.ceil(LARGEST_FRESH_SHARE * batch_tokens))


def _sums(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Sums of consecutive segments of these sizes over all parts."""
    values = torch.cat(list(parts))
    return segment_sums(values, torch.tensor(sizes, device=values.device))


def _stretches(
    trajectories: Sequence[Trajectory], policy_version: int
) -> Iterator[tuple[int, int]]:
    """Start and end of each longest run of trained tokens that one version sampled."""
    start = end = 0
    for trajectory in trajectories:
        for span in trajectory.version_spans:
            if span.policy_version != policy_version and end > start:
                yield start, end
            end += span.num_tokens
            if span.policy_version != policy_version:
                start = end
        if end > start:
            yield start, end
        start = end
