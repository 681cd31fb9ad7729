"""Fresh tokens: those that the learner scored with the very version that sampled them.

Staleness has no part in what sampler and learner say of them; what is left is the mismatch of the
two. A trajectory need not be fresh as a whole: after a swap in mid-answer its last tokens are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from vcpo.algo import FRESH_BLOCK_TOKENS, FreshTokens, MismatchCalibration, near_equal_blocks
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.update.token_statistics import piece_sums

LARGEST_FRESH_SHARE = 0.25
"""Part of a batch's tokens that may be scored beside it for calibration: without a backward pass,
they cost about a tenth of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshPieces:
    """Pieces of fresh tokens, as `MismatchCalibration` takes them in."""

    log_weights: tuple[float, ...] = ()
    """Sum of each piece's log ratios, nats, below +inf and no NaN."""
    num_tokens: tuple[int, ...] = ()
    """Tokens of each piece, at least 1."""
    absolute_log_ratio: float = 0.0
    """Sum over all tokens of |log pi - log mu|, nats."""

    @property
    def tokens(self) -> FreshTokens:
        """The same as the start-up check takes it in."""
        return FreshTokens(
            num_blocks=len(self.num_tokens),
            num_tokens=sum(self.num_tokens),
            absolute_log_ratio=self.absolute_log_ratio,
        )

    def joined(self, other: FreshPieces) -> FreshPieces:
        """The pieces of both."""
        return FreshPieces(
            log_weights=self.log_weights + other.log_weights,
            num_tokens=self.num_tokens + other.num_tokens,
            absolute_log_ratio=self.absolute_log_ratio + other.absolute_log_ratio,
        )


def fresh_pieces(
    trajectories: Sequence[Trajectory], log_ratios: Sequence[Tensor], policy_version: int
) -> FreshPieces:
    """What the tokens of a version say, cut into pieces.

    log_ratios: [B] of [T_i] log pi - log mu of the sampled tokens, nats; pi is that version.
    A stretch whose sum is NaN or +inf says nothing of engines that work, and is left out.
    """
    runs = [
        ratios[start:end]
        for trajectory, ratios in zip(trajectories, log_ratios, strict=True)
        for start, end in _runs(trajectory, policy_version)
    ]
    runs = [run for run in runs if bool((run < torch.inf).all())]
    if not runs:
        return FreshPieces()
    sizes = list(
        chain.from_iterable(near_equal_blocks(len(run), FRESH_BLOCK_TOKENS) for run in runs)
    )
    ratios = torch.cat(runs)
    return FreshPieces(
        log_weights=tuple(piece_sums(ratios, sizes).tolist()),
        num_tokens=tuple(sizes),
        absolute_log_ratio=float(ratios.abs().sum()),
    )


def wanted_fresh_tokens(
    calibration: MismatchCalibration, batch_tokens: int, *, num_blocks: int = 0
) -> int:
    """Fresh tokens to look for beside a batch of so many tokens that has so many fresh pieces."""
    missing = max(0, calibration.wanted_count - num_blocks)
    return min(missing * FRESH_BLOCK_TOKENS, math.ceil(LARGEST_FRESH_SHARE * batch_tokens))


def _runs(trajectory: Trajectory, policy_version: int) -> Iterator[tuple[int, int]]:
    """Ends of the longest stretches of sampled tokens that one version sampled."""
    start = end = 0
    for span in trajectory.version_spans:
        if span.policy_version == policy_version:
            end += span.num_tokens
            continue
        if end > start:
            yield start, end
        start = end = end + span.num_tokens
    if end > start:
        yield start, end
