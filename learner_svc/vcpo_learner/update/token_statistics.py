"""What a batch's token log ratios add up to, in tensors: there may be millions of them.

The sums are those of `vcpo.algo`, which knows plain numbers only; each function names its twin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from vcpo.algo import TokenSums, WeightMoments
from vcpo.algo.ess.importance_weights import LARGEST_LOG_RATIO
from vcpo.wire.trajectory import Trajectory


def token_log_ratios(
    trajectories: Sequence[Trajectory], learner_logprobs: Sequence[Sequence[float]]
) -> list[Tensor]:
    """Log pi - log mu of each trajectory's response tokens, [B] of [T_i] float64 nats."""
    return [
        torch.tensor(row, dtype=torch.float64)
        - torch.tensor(trajectory.rollout_logprobs, dtype=torch.float64)
        for trajectory, row in zip(trajectories, learner_logprobs, strict=True)
    ]


def token_sums(log_ratios: Sequence[Tensor], cap: float) -> TokenSums:
    """Sums over all tokens; `TokenSums.of` is its twin. cap: largest ratio kept, inf for none."""
    flat = torch.cat(list(log_ratios))
    held = flat.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return TokenSums(
        weights=_moments(flat),
        truncated=_moments(flat.clamp(max=math.log(cap))),
        k3_sum=float((torch.expm1(held) - held).sum()),
    )


def block_moments(log_ratios: Sequence[Tensor], pieces: Sequence[Sequence[int]]) -> WeightMoments:
    """Moments of the weights of all pieces; `block_log_weights` is its twin.

    pieces: [B][pieces] tokens of each; those of a trajectory add up to it.
    """
    return _moments(piece_sums(torch.cat(list(log_ratios)), list(chain.from_iterable(pieces))))


def piece_sums(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Sums [pieces] over consecutive pieces of float64 values; sizes add up to their number."""
    lengths = torch.tensor(sizes)
    piece_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, piece_of, values)


def _moments(log_weights: Tensor) -> WeightMoments:
    return WeightMoments(
        count=len(log_weights),
        log_sum=float(log_weights.logsumexp(dim=0)),
        log_sum_squares=float((2.0 * log_weights).logsumexp(dim=0)),
    )
