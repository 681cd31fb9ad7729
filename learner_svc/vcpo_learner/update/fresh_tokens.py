"""Fresh tokens: the learner scored them with the version that sampled them.

Their log ratios contain no staleness, only the mismatch of the two engines. A trajectory may be
fresh in part: after a change of version during its generation, its last tokens are fresh, unless
they read keys and values of older weights (`kvCache: keep`). A response that one worker began and
another resumed says nothing about either, and is left out. `Mismatch` keeps what they say over the
steps, the same on every rank: how far the engines are apart, and which workers are at fault.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from vcpo.algo.ess.calibration import MismatchCalibration
from vcpo.algo.ess.unit import near_equal_blocks
from vcpo.algo.health.fresh_tokens import FRESH_BLOCK_TOKENS, MIN_FRESH_BLOCKS, FreshBlock
from vcpo.algo.health.mismatch_review import MismatchReview, largest_variance, review
from vcpo.api import VCPORunSpec
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.device import to_device
from vcpo_learner.estimator.record import segment_sums

LARGEST_FRESH_SHARE = 0.25
"""Part of a batch's tokens that may be scored beside it for calibration: without a backward pass,
they cost about a tenth of the step."""


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
) -> tuple[FreshBlock, ...]:
    """Return the tokens that a version sampled, cut into blocks.

    log_ratios: [N] float64 log pi - log mu of the trained tokens, nats, one trajectory after
        another; pi is that version.
    logprobs: [N] log mu of the same tokens, nats.
    A stretch whose sum is NaN or +inf says nothing about engines that work, and is left out.
    """
    stretches = list(_stretches(trajectories, policy_version))
    if not stretches:
        return ()
    sizes = [each.end - each.start for each in stretches]
    own = torch.cat([log_ratios[each.start : each.end] for each in stretches])
    totals: list[float] = segment_sums(own, to_device(torch.tensor(sizes), own.device)).tolist()
    kept = [each for each, total in zip(stretches, totals, strict=True) if total < math.inf]
    if not kept:
        return ()
    cuts = [near_equal_blocks(each.end - each.start, FRESH_BLOCK_TOKENS) for each in kept]
    blocks = [
        (each.worker, each.position + offset, size)
        for each, lengths in zip(kept, cuts, strict=True)
        for offset, size in zip(accumulate(lengths[:-1], initial=0), lengths, strict=True)
    ]
    ratios = torch.cat([log_ratios[each.start : each.end] for each in kept]).double()
    sampled = torch.cat([logprobs[each.start : each.end] for each in kept]).double()
    return tuple(_cut(ratios, sampled, blocks))


def _cut(
    ratios: Tensor, logprobs: Tensor, blocks: Sequence[tuple[str, int, int]]
) -> Iterator[FreshBlock]:
    """Yield the sums of consecutive blocks; blocks: worker, first position and size of each."""
    gaps = ratios.abs()
    columns = torch.stack(
        [
            ratios,
            gaps,
            torch.expm1(ratios) - ratios,
            logprobs,
            logprobs.square(),
            logprobs * ratios,
        ],
        dim=1,
    )
    sizes = to_device(torch.tensor([size for *_, size in blocks]), ratios.device)
    largest: list[float] = torch.segment_reduce(gaps, "max", lengths=sizes, unsafe=True).tolist()
    rows: list[list[float]] = segment_sums(columns, sizes).tolist()
    for (worker, position, size), row, most in zip(blocks, rows, largest, strict=True):
        yield FreshBlock(
            worker=worker,
            num_tokens=size,
            position=position,
            log_ratio=row[0],
            absolute_log_ratio=row[1],
            divergence=row[2],
            largest=most,
            logprob=row[3],
            logprob_square=row[4],
            logprob_log_ratio=row[5],
        )


def wanted_fresh_tokens(num_missing: int, batch_tokens: int) -> int:
    """Return the number of fresh tokens to score beside a batch that lacks so many fresh blocks."""
    missing = max(0, num_missing)
    return min(missing * FRESH_BLOCK_TOKENS, math.ceil(LARGEST_FRESH_SHARE * batch_tokens))


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


_STATE = TypeAdapter(MismatchCalibration)


class Mismatch:
    """Calibration and review of a run, over one window of fresh blocks. Owner: the update."""

    def __init__(self, spec: VCPORunSpec) -> None:
        self._is_ratio_given = spec.algorithm.on_policy_ess_ratio is not None
        self._limit_nats = spec.mismatch_limit_nats
        self.calibration = MismatchCalibration(ceiling=largest_variance(self._limit_nats))
        """Without the blocks of workers at fault."""

    @property
    def calibration_age_steps(self) -> int:
        return 0 if self._is_ratio_given else self.calibration.age_steps

    def wanted_fresh_tokens(self, num_blocks: int, batch_tokens: int) -> int:
        # A ratio that is given needs no calibration, but workers are compared at every step.
        wanted = MIN_FRESH_BLOCKS if self._is_ratio_given else self.calibration.wanted_count
        return wanted_fresh_tokens(wanted - num_blocks, batch_tokens)

    def observe(self, fresh: Sequence[FreshBlock]) -> MismatchReview:
        """Return what the window says with a step's fresh blocks; leave out workers at fault."""
        observed = self.calibration.observe(fresh)
        found = review(observed.blocks, self._limit_nats)
        self.calibration = observed.without([fault.worker for fault in found.at_fault])
        return found

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = _STATE.dump_python(self.calibration)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        ceiling = self.calibration.ceiling
        self.calibration = replace(_STATE.validate_python(state), ceiling=ceiling)
