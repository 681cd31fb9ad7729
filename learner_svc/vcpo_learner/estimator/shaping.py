r"""Rewards before the baseline, and what is done to advantages after it.

Sources: overlong punishment, DAPO, arXiv 2503.14476; residuals, TBA, arXiv 2503.18929, AGRO, arXiv
2503.19612, and Kimi k1.5, arXiv 2501.12599; whitening over the batch, REINFORCE++, arXiv
2501.03262; V-trace, IMPALA, arXiv 1802.01561.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vcpo.algo import KLPenalty, LossConfig
from vcpo_learner.estimator.record import BatchRecord


def overlong_penalty(num_tokens: int, longest_answer: int, share: float) -> float:
    """Soft punishment of a long answer, in [0, 1].

    share: last part of the longest answer allowed over which it rises from 0 to 1; 0 is none.
    """
    if share == 0.0:
        return 0.0
    excess = num_tokens - longest_answer * (1.0 - share)
    return min(max(excess / (longest_answer * share), 0.0), 1.0)


def regularized_rewards(
    rewards: Sequence[float], record: BatchRecord, config: LossConfig
) -> Tensor:
    """Rewards that the baseline is taken of, [B]: R - beta log(pi/ref), where the method asks.

    rewards: [B], after the penalty.
    Departure from TBA, whose loss is in units of beta: R - beta log(pi/ref) is its R/beta - log
    times beta, one constant on the whole gradient, which AdamW divides out.
    """
    shaped = torch.tensor(rewards, dtype=torch.float64)
    if config.kl_penalty is not KLPenalty.REFERENCE:
        return shaped
    if record.reference_logprobs is None:
        raise ValueError("reference_logprobs is None: this residual needs one per token")
    drift = (record.logprobs.learner - record.reference_logprobs) * record.logprobs.mask
    return shaped - config.kl_coefficient * drift.sum(dim=1)


def token_advantages(
    advantages: Sequence[float], record: BatchRecord, config: LossConfig
) -> Tensor:
    """Advantages [B] of trajectories as advantages [B, width] of tokens, after the baseline."""
    if config.has_critic:
        if record.advantages is None:
            raise ValueError("advantages is None: this method needs one per token")
        return record.advantages
    of_trajectories = torch.tensor(advantages, dtype=torch.float64)
    if config.kl_penalty is KLPenalty.BEHAVIOR:
        drift = record.logprobs.log_ratios.sum(dim=1)
        of_trajectories = of_trajectories - config.kl_coefficient * drift
    spread = of_trajectories[:, None].expand_as(record.logprobs.learner)
    return whitened(spread, record.logprobs.mask) if config.is_whitened else spread


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Values [B, width] with mean 0 and deviation 1 over the mask; 0 when they are all equal."""
    chosen = values[mask]
    deviation = chosen.std(correction=0)
    if float(deviation) == 0.0:
        return torch.zeros_like(values)
    return (values - chosen.mean()) / deviation
