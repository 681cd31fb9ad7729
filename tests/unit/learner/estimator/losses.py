"""Surrogate losses as their papers write them, for autograd: the independent formula.

Each takes the learner's log-probabilities [B, width], which it may differentiate, beside constants.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vcpo_learner.estimator.record import BatchRecord

Loss = Callable[[Tensor, BatchRecord, Tensor], Tensor]


def sequence_mean(values: Tensor, record: BatchRecord) -> Tensor:
    mask = record.logprobs.mask
    return ((values * mask).sum(1) / mask.sum(1)).mean()


def token_mean(values: Tensor, record: BatchRecord) -> Tensor:
    mask = record.logprobs.mask
    return (values * mask).sum() / mask.sum()


def sequence_sum(values: Tensor, record: BatchRecord) -> Tensor:
    return (values * record.logprobs.mask).sum(1).mean()


def ratios(learner: Tensor, record: BatchRecord) -> Tensor:
    return (learner - record.logprobs.rollout).exp()


def sequence_ratios(learner: Tensor, record: BatchRecord) -> Tensor:
    gaps = (learner - record.logprobs.rollout) * record.logprobs.mask
    return gaps.sum(1, keepdim=True).exp()


def geometric_ratios(learner: Tensor, record: BatchRecord) -> Tensor:
    gaps = (learner - record.logprobs.rollout) * record.logprobs.mask
    return (gaps.sum(1, keepdim=True) / record.logprobs.mask.sum(1, keepdim=True)).exp()


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    bounded = ratio.clamp(low, high)
    return torch.minimum(ratio * advantages, bounded * advantages)


def reinforce(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    return -sequence_mean(advantages * learner, record)


def sequence_tis(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    weights = sequence_ratios(learner, record).clamp(max=8.0).detach()
    return -sequence_mean(weights * advantages * learner, record)


def token_tis(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    weights = ratios(learner, record).clamp(max=2.0).detach()
    return -token_mean(weights * advantages * learner, record)


def rloo(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    weights = sequence_ratios(learner, record).clamp(max=8.0).detach()
    return -sequence_sum(weights * advantages * learner, record)


def grpo(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    return -sequence_mean(clipped(ratios(learner, record), advantages, 0.8, 1.2), record)


def dr_grpo(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    surrogate = clipped(ratios(learner, record), advantages, 0.8, 1.2) * record.logprobs.mask
    return -surrogate.sum() / (len(surrogate) * record.size.longest_answer)


def ppo(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    surrogate = clipped(ratios(learner, record), advantages, 0.8, 1.2)
    held = torch.maximum(surrogate, 3.0 * advantages)
    return -token_mean(torch.where(advantages < 0, held, surrogate), record)


def dapo(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    return -token_mean(clipped(ratios(learner, record), advantages, 0.8, 1.28), record)


def gspo(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    surrogate = clipped(geometric_ratios(learner, record), advantages[:, :1], 1 - 3e-4, 1 + 4e-4)
    return -surrogate.mean()


def cispo(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    weights = ratios(learner, record).clamp(max=5.0).detach()
    return -token_mean(weights * advantages * learner, record)


def ice_pop(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    ratio = ratios(learner, record).detach()
    weights = torch.where((ratio >= 0.5) & (ratio <= 5.0), ratio, 0.0)
    return -token_mean(weights * advantages * learner, record)


def sequence_mask(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    ratio = sequence_ratios(learner, record).detach()
    weights = torch.where((ratio >= 0.5) & (ratio <= 2.0), ratio, 0.0)
    return -sequence_mean(weights * advantages * learner, record)


def geometric_mask(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    ratio = geometric_ratios(learner, record).detach()
    kept = ((ratio >= 0.999) & (ratio <= 1.001)).double()
    return -sequence_mean(kept * advantages * learner, record)


def opsm(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    dropped = (advantages < 0) & (-geometric_ratios(learner, record).log() > 0.1)
    surrogate = clipped(ratios(learner, record), advantages, 0.8, 1.2)
    return -token_mean(surrogate * ~dropped, record)


def tba(learner: Tensor, record: BatchRecord, rewards: Tensor) -> Tensor:
    """Half the loss of the paper times beta squared: the direction, in units of the reward."""
    beta, mask = 0.012, record.logprobs.mask
    drift = ((learner - record.reference_logprobs) * mask).sum(1)
    log_z = (rewards / beta - drift).mean().detach()
    return beta * 0.5 * (log_z + drift - rewards / beta).square().mean()


def agro(learner: Tensor, record: BatchRecord, rewards: Tensor) -> Tensor:
    """Half the variance of the regularized reward, over beta."""
    beta, mask = 0.1, record.logprobs.mask
    drift = ((learner - record.reference_logprobs) * mask).sum(1)
    return 0.5 * (rewards - beta * drift).var(correction=0) / beta


def opmd(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    return -token_mean(advantages * learner, record)


def topr(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    tapered = sequence_ratios(learner, record).clamp(max=1.0).detach()
    return -sequence_sum(torch.where(advantages < 0, tapered, 1.0) * advantages * learner, record)


def kimi(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    tau = 0.1
    gaps = ((learner - record.logprobs.rollout) * record.logprobs.mask).sum(1)
    total = (learner * record.logprobs.mask).sum(1)
    return -(advantages[:, 0] * total - tau / 2 * gaps.square()).mean()


def decoupled_ppo(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    behavior = ratios(learner, record).clamp(max=5.0).detach()
    proximal = (learner - learner.detach()).exp()
    return -token_mean(behavior * clipped(proximal, advantages, 0.8, 1.2), record)


def a3po(learner: Tensor, record: BatchRecord, advantages: Tensor) -> Tensor:
    """The record's lag is 3, so that alpha is 2/3."""
    gaps = learner - record.logprobs.rollout
    proximal = (record.logprobs.rollout + 2.0 / 3.0 * gaps).detach()
    behavior = (proximal - record.logprobs.rollout).exp()
    return -token_mean(behavior * clipped((learner - proximal).exp(), advantages, 0.8, 1.2), record)
