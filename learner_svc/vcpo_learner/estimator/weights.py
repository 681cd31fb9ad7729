r"""What a trajectory's tokens weigh by themselves: importance weight times aggregation.

    a_it = w_it / (what the aggregation divides by),    w from u_t = pi/mu, W = prod u, s = W^(1/T).

No advantage, no other trajectory and no batch-level mask is in it, so the norm of
sum_t a_it grad log pi is the norm that the optimal baseline asks for. It is held constant.

Sources: token and sequence truncation, Yao et al., "Your efficient RL framework secretly brings you
off-policy RL training" (2025), and VCPO, arXiv 2602.17616; masked form, IcePop (Ring-1T, arXiv
2510.18855); geometric ratio, GSPO, arXiv 2507.18071; CISPO, arXiv 2506.13585.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vcpo.algo import Aggregation, LossConfig, Weight
from vcpo_learner.estimator.record import BatchSize, TokenLogprobs


def local_weights(logprobs: TokenLogprobs, config: LossConfig, size: BatchSize) -> Tensor:
    """Weights a_it, at least 0, of any rows of a batch.

    logprobs: [n, width]; size: of the whole batch.
    Returns: [n, width] in the type of `logprobs.learner`, 0 outside the mask.
    """
    return importance_weights(logprobs, config) * aggregation_weights(logprobs, config, size)


def importance_weights(logprobs: TokenLogprobs, config: LossConfig) -> Tensor:
    """Ratios of learner to sampler, [n, width], cut or dropped as the config says."""
    log_ratios = ratio_logs(logprobs, config.weight)
    cap = math.log(config.largest_weight)
    ratios = log_ratios.clamp(max=cap).exp()
    floor = math.log(config.weight_floor) if config.weight_floor > 0.0 else -math.inf
    is_dropped = (log_ratios < floor) | ((log_ratios > cap) & config.drops_above_cap)
    kept = torch.ones_like(ratios) if config.is_mask else ratios
    return kept.masked_fill(is_dropped, 0.0)


def ratio_logs(logprobs: TokenLogprobs, weight: Weight) -> Tensor:
    """Log of the ratio that a kind of weight is about, [n, width] nats, untruncated."""
    log_ratios = logprobs.log_ratios
    totals = log_ratios.sum(dim=1, keepdim=True)
    match weight:
        case Weight.NONE:
            return torch.zeros_like(log_ratios)
        case Weight.TOKEN:
            return log_ratios
        case Weight.SEQUENCE:
            return totals.expand_as(log_ratios)
        case Weight.GEOMETRIC:
            return (totals / logprobs.lengths[:, None]).expand_as(log_ratios)


def aggregation_weights(logprobs: TokenLogprobs, config: LossConfig, size: BatchSize) -> Tensor:
    """What each token counts, [n, width], before any ratio; 0 outside the mask."""
    tokens = logprobs.mask.to(logprobs.learner.dtype)
    match config.aggregation:
        case Aggregation.SEQUENCE_MEAN:
            return tokens / logprobs.lengths[:, None] / size.trajectories
        case Aggregation.TOKEN_MEAN:
            return tokens / size.tokens
        case Aggregation.SEQUENCE_SUM:
            return tokens / size.trajectories
        case Aggregation.CONSTANT:
            return tokens / (size.trajectories * size.longest_answer)
