"""A loss and a baseline of one's own.

algorithm: {method: grpo, loss: "soft_clip:soft_clip", baseline: "soft_clip:length_weighted"}
"""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from vcpo.algo.methods import LossConfig
from vcpo_learner.estimator.record import BatchRecord, TokenCoefficients

WIDTH_NATS: Final = 0.3
"""Distance of log pi from log mu at which a token counts exp(-1/2) of what it would count."""


def soft_clip(record: BatchRecord, advantages: Tensor, config: LossConfig) -> TokenCoefficients:
    """Return GRPO's coefficients with a bell in place of the clip: no token falls off an edge.

    k = -A u exp(-(log u / width)^2 / 2) / (B T), with u = pi/mu of the token.
    """
    log_ratios = record.log_ratios
    kept = torch.exp(-0.5 * (log_ratios / WIDTH_NATS).square())
    weights = log_ratios.clamp(max=5.0).exp() * kept
    divisors = record.spread(record.lengths * record.size.trajectories)
    return TokenCoefficients(
        values=-record.spread(advantages) * weights / divisors,
        masked_share=float((kept < 0.5).double().mean()),
    )


def length_weighted(rewards: Sequence[float], num_tokens: Sequence[int]) -> list[float]:
    """Return the advantages over a mean that weighs each reward by the length of its response.

    It is the optimal baseline if squared gradient norms are proportional to lengths.
    Source: OPO, arXiv 2505.23585.
    """
    weighed = math.fsum(length * reward for length, reward in zip(num_tokens, rewards, strict=True))
    baseline = weighed / math.fsum(num_tokens)
    return [reward - baseline for reward in rewards]
