"""Fresh tokens: the learner scored them with the version that sampled them.

Their log ratios contain no staleness, only the mismatch of the two engines. A trajectory may be
fresh in part: after a change of version during its generation, its last tokens are fresh. A
response that one worker began and another resumed says nothing about either, and is left out.
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
    absolute_log_ratios: tuple[float, ...] = ()
    """Sum of |log pi - log mu| over the tokens of each block, nats."""
    workers: tuple[str, ...] = ()
    """The worker that sampled each block."""

    @property
    def tokens(self) -> dict[str, FreshTokens]:
        """The counts that the start-up check takes, by worker."""
        found: dict[str, FreshTokens] = {}
        rows = zip(self.workers, self.num_tokens, self.absolute_log_ratios, strict=True)
        for worker, num_tokens, absolute_log_ratio in rows:
            block = FreshTokens(
                num_blocks=1, num_tokens=num_tokens, absolute_log_ratio=absolute_log_ratio
            )
            found[worker] = found.get(worker, FreshTokens()) + block
        return found

    def join(self, other: FreshBlocks) -> FreshBlocks:
        """Return the blocks of both."""
        return FreshBlocks(
            log_weights=self.log_weights + other.log_weights,
            num_tokens=self.num_tokens + other.num_tokens,
            absolute_log_ratios=self.absolute_log_ratios + other.absolute_log_ratios,
            workers=self.workers + other.workers,
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
    parts = [log_ratios[start:end] for _, start, end in stretches]
    totals: list[float] = _sums(parts, [len(part) for part in parts]).tolist()
    kept = [place for place, total in enumerate(totals) if total < math.inf]
    if not kept:
        return FreshBlocks()
    parts = [parts[place] for place in kept]
    blocks = [near_equal_blocks(len(part), FRESH_BLOCK_TOKENS) for part in parts]
    sizes = list(chain.from_iterable(blocks))
    return FreshBlocks(
        log_weights=tuple(_sums(parts, sizes).tolist()),
        num_tokens=tuple(sizes),
        absolute_log_ratios=tuple(_sums([part.abs() for part in parts], sizes).tolist()),
        workers=tuple(
            stretches[place][0] for place, each in zip(kept, blocks, strict=True) for _ in each
        ),
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
) -> Iterator[tuple[str, int, int]]:
    """Worker, start and end of each longest run of trained tokens that it and a version sampled."""
    start = end = 0
    for trajectory in trajectories:
        worker = trajectory.worker_id
        for span in trajectory.version_spans:
            is_fresh = span.policy_version == policy_version and worker is not None
            if not is_fresh and end > start:
                yield worker or "", start, end
            end += span.num_tokens
            if not is_fresh:
                start = end
        if end > start:
            yield worker or "", start, end
        start = end
