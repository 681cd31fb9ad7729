"""Sums over a batch's token log ratios, in tensors: there may be millions of them.

The sums are those of `vcpo.algo`, which knows plain numbers only; each function
names its twin there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from vcpo.algo import TokenSums, WeightMoments
from vcpo.algo.ess.importance_weights import LARGEST_LOG_RATIO
from vcpo_learner.device import to_device
from vcpo_learner.estimator.record import segment_sums


def token_sums(log_ratios: Tensor, cap: float) -> TokenSums:
    """Return sums over all tokens; the twin in plain numbers is `TokenSums.of`.

    log_ratios: [N] float64 log pi - log mu, nats. cap: largest ratio kept, inf for none.
    """
    held = log_ratios.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return TokenSums(
        weights=_moments(log_ratios),
        truncated=_moments(log_ratios.clamp(max=math.log(cap))),
        k3_sum=float((torch.expm1(held) - held).sum()),
    )


def block_moments(log_ratios: Tensor, blocks: Sequence[Sequence[int]]) -> WeightMoments:
    """Return the moments of the weights of all blocks; the twin is `block_log_weights`.

    log_ratios: [N] float64 nats. blocks: [B][blocks] tokens of each block; those of a trajectory
        add up to it.
    """
    sizes = to_device(torch.tensor([*chain.from_iterable(blocks)], device="cpu"), log_ratios.device)
    return _moments(segment_sums(log_ratios, sizes))


def _moments(log_weights: Tensor) -> WeightMoments:
    return WeightMoments(
        count=len(log_weights),
        log_sum=float(log_weights.logsumexp(dim=0)),
        log_sum_squares=float((2.0 * log_weights).logsumexp(dim=0)),
    )
