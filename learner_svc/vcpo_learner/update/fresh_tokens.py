"""Fresh tokens: the learner scored them with the version that sampled them.

Their log ratios contain no staleness, only the mismatch of the two engines. A trajectory may be
fresh in part: after a change of version during its generation, its last tokens are fresh, unless
they read keys and values of older weights (`kvCache: keep`). A response that one worker began and
another resumed says nothing about either, and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from vcpo.algo.ess.calibration import FRESH_BLOCK_TOKENS
from vcpo.algo.ess.unit import near_equal_blocks
from vcpo.algo.health.fresh_tokens import FreshTokens
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.device import to_device
from vcpo_learner.estimator.record import segment_sums

LARGEST_FRESH_SHARE = 0.25
"""Part of a batch's tokens that may be scored beside it for calibration: without a backward pass,
they cost about a tenth of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshBlocks:
    """Blocks of fresh tokens, as `MismatchCalibration.observe` takes them."""

    blocks: tuple[FreshTokens, ...] = ()
    """Each block's sums; that of its log ratios is below +inf and not NaN."""
    workers: tuple[str, ...] = ()
    """The worker that sampled each block."""

    @property
    def log_weights(self) -> tuple[float, ...]:
        """Sum of each block's log ratios, nats."""
        return tuple(block.log_ratio for block in self.blocks)

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Tokens of each block, at least 1."""
        return tuple(block.num_tokens for block in self.blocks)

    @property
    def by_worker(self) -> dict[str, list[FreshTokens]]:
        """The blocks of each worker, in this order."""
        found: dict[str, list[FreshTokens]] = {}
        for worker, block in zip(self.workers, self.blocks, strict=True):
            found.setdefault(worker, []).append(block)
        return found

    @property
    def tokens(self) -> dict[str, FreshTokens]:
        """The sums over all blocks of each worker."""
        return {name: sum(each, FreshTokens()) for name, each in self.by_worker.items()}

    def join(self, other: FreshBlocks) -> FreshBlocks:
        """Return the blocks of both."""
        return FreshBlocks(blocks=self.blocks + other.blocks, workers=self.workers + other.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """A longest run of trained tokens that a worker and a version sampled."""

    worker: str
    start: int
    """Index of its first token in the batch."""
    end: int
    """Index after its last token."""
    position: int
    """Number of its first token among the trained ones of its answer, from 0."""


def fresh_blocks(
    trajectories: Sequence[Trajectory],
    log_ratios: Tensor,
    policy_version: int,
    logprobs: Tensor,
) -> FreshBlocks:
    """Return the tokens that a version sampled, cut into blocks.

    log_ratios: [N] float64 log pi - log mu of the trained tokens, nats, one trajectory after
        another; pi is that version.
    logprobs: [N] log mu of the same tokens, nats.
    A stretch whose sum is NaN or +inf says nothing about engines that work, and is left out.
    """
    stretches = list(_stretches(trajectories, policy_version))
    if not stretches:
        return FreshBlocks()
    totals: list[float] = _sums(
        torch.cat([log_ratios[each.start : each.end] for each in stretches]),
        [each.end - each.start for each in stretches],
    ).tolist()
    kept = [each for each, total in zip(stretches, totals, strict=True) if total < math.inf]
    if not kept:
        return FreshBlocks()
    sizes = [near_equal_blocks(each.end - each.start, FRESH_BLOCK_TOKENS) for each in kept]
    return FreshBlocks(
        blocks=tuple(
            token_blocks(
                torch.cat([log_ratios[each.start : each.end] for each in kept]),
                torch.cat([logprobs[each.start : each.end] for each in kept]),
                list(chain.from_iterable(sizes)),
                [
                    each.position + offset
                    for each, lengths in zip(kept, sizes, strict=True)
                    for offset in accumulate(lengths[:-1], initial=0)
                ],
            )
        ),
        workers=tuple(
            each.worker for each, lengths in zip(kept, sizes, strict=True) for _ in lengths
        ),
    )


def token_blocks(
    log_ratios: Tensor, logprobs: Tensor, sizes: Sequence[int], positions: Sequence[int]
) -> Iterator[FreshTokens]:
    """Yield the sums of consecutive blocks of tokens.

    log_ratios, logprobs: [N] nats; sizes, positions: tokens of each block, and the number of its
    first token in the answer.
    """
    ratios, logprobs = log_ratios.double(), logprobs.double()
    gaps = ratios.abs()
    columns = torch.stack(
        [
            gaps,
            ratios,
            ratios.square(),
            torch.expm1(ratios) - ratios,
            logprobs,
            logprobs.square(),
            logprobs * ratios,
        ],
        dim=1,
    )
    lengths = to_device(torch.tensor(sizes), ratios.device)
    largest: list[float] = torch.segment_reduce(gaps, "max", lengths=lengths, unsafe=True).tolist()
    rows: list[list[float]] = segment_sums(columns, lengths).tolist()
    for size, position, row, most in zip(sizes, positions, rows, largest, strict=True):
        yield FreshTokens(
            num_blocks=1,
            num_tokens=size,
            position=position,
            absolute_log_ratio=row[0],
            log_ratio=row[1],
            square=row[2],
            divergence=row[3],
            largest=most,
            logprob=row[4],
            logprob_square=row[5],
            logprob_log_ratio=row[6],
        )


def wanted_fresh_tokens(num_missing: int, batch_tokens: int) -> int:
    """Return the number of fresh tokens to score beside a batch that lacks so many fresh blocks."""
    missing = max(0, num_missing)
    return min(missing * FRESH_BLOCK_TOKENS, math.ceil(LARGEST_FRESH_SHARE * batch_tokens))


def _sums(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Sums of consecutive segments of these sizes."""
    return segment_sums(values, to_device(torch.tensor(sizes), values.device))


def _stretches(trajectories: Sequence[Trajectory], policy_version: int) -> Iterator[_Stretch]:
    """Each longest run of trained tokens that a worker and a version sampled."""
    first = start = end = 0
    for trajectory in trajectories:
        worker = trajectory.worker_id
        for span in trajectory.version_spans:
            is_fresh = (
                worker is not None
                and span.policy_version == policy_version
                and span.key_age_versions == 0
            )
            if not is_fresh and end > start:
                yield _Stretch(worker=worker or "", start=start, end=end, position=start - first)
            end += span.num_tokens
            if not is_fresh:
                start = end
        if end > start:
            yield _Stretch(worker=worker or "", start=start, end=end, position=start - first)
        first = start = end
