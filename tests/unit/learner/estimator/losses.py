"""Surrogate losses as their papers write them, for autograd: the independent formula.

Each takes the target policy's log-probabilities [B, width], which it may differentiate, beside
constants. The layout is an independent one too: padded, where the record has no padding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vcpo_learner.estimator.record import BatchRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedBatch:
    """The constants of a record, [B, width]."""

    rollout: Tensor
    mask: Tensor
    longest_response: int
    reference_logprobs: Tensor | None


Loss = Callable[[Tensor, PaddedBatch, Tensor], Tensor]


def pad(record: BatchRecord, values: Tensor) -> Tensor:
    """Values [N] as [B, width], with numbers in the padding that no loss may depend on."""
    rows = torch.split(values, list(record.num_tokens))
    return pad_sequence(list(rows), batch_first=True, padding_value=-7.0)


def padded_batch(record: BatchRecord) -> PaddedBatch:
    reference = record.reference_logprobs
    return PaddedBatch(
        rollout=pad(record, record.rollout_logprobs),
        mask=pad(record, torch.ones_like(record.rollout_logprobs)) > 0.0,
        longest_response=record.size.longest_response,
        reference_logprobs=None if reference is None else pad(record, reference),
    )


def sequence_mean(values: Tensor, record: PaddedBatch) -> Tensor:
    mask = record.mask
    return ((values * mask).sum(1) / mask.sum(1)).mean()


def token_mean(values: Tensor, record: PaddedBatch) -> Tensor:
    mask = record.mask
    return (values * mask).sum() / mask.sum()


def sequence_sum(values: Tensor, record: PaddedBatch) -> Tensor:
    return (values * record.mask).sum(1).mean()


def ratios(learner: Tensor, record: PaddedBatch) -> Tensor:
    return (learner - record.rollout).exp()


def sequence_ratios(learner: Tensor, record: PaddedBatch) -> Tensor:
    gaps = (learner - record.rollout) * record.mask
    return gaps.sum(1, keepdim=True).exp()


def geometric_ratios(learner: Tensor, record: PaddedBatch) -> Tensor:
    gaps = (learner - record.rollout) * record.mask
    return (gaps.sum(1, keepdim=True) / record.mask.sum(1, keepdim=True)).exp()


def clipped_objective(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    bounded = ratio.clamp(low, high)
    return torch.minimum(ratio * advantages, bounded * advantages)


def reinforce(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    return -sequence_mean(advantages * learner, record)


def sequence_tis(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    weights = sequence_ratios(learner, record).clamp(max=8.0).detach()
    return -sequence_mean(weights * advantages * learner, record)


def token_tis(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    weights = ratios(learner, record).clamp(max=2.0).detach()
    return -token_mean(weights * advantages * learner, record)


def rloo(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    weights = sequence_ratios(learner, record).clamp(max=8.0).detach()
    return -sequence_sum(weights * advantages * learner, record)


def grpo(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    return -sequence_mean(clipped_objective(ratios(learner, record), advantages, 0.8, 1.2), record)


def dr_grpo(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    surrogate = clipped_objective(ratios(learner, record), advantages, 0.8, 1.2) * record.mask
    return -surrogate.sum() / (len(surrogate) * record.longest_response)


def ppo(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    surrogate = clipped_objective(ratios(learner, record), advantages, 0.8, 1.2)
    held = torch.maximum(surrogate, 3.0 * advantages)
    return -token_mean(torch.where(advantages < 0, held, surrogate), record)


def dapo(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    return -token_mean(clipped_objective(ratios(learner, record), advantages, 0.8, 1.28), record)


def gspo(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    surrogate = clipped_objective(
        geometric_ratios(learner, record), advantages[:, :1], 1 - 3e-4, 1 + 4e-4
    )
    return -surrogate.mean()


def cispo(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    weights = ratios(learner, record).clamp(max=5.0).detach()
    return -token_mean(weights * advantages * learner, record)


def ice_pop(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    ratio = ratios(learner, record).detach()
    weights = torch.where((ratio >= 0.5) & (ratio <= 5.0), ratio, 0.0)
    return -token_mean(weights * advantages * learner, record)


def sequence_mask(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    ratio = sequence_ratios(learner, record).detach()
    weights = torch.where((ratio >= 0.5) & (ratio <= 2.0), ratio, 0.0)
    return -sequence_mean(weights * advantages * learner, record)


def geometric_mask(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    ratio = geometric_ratios(learner, record).detach()
    kept = ((ratio >= 0.999) & (ratio <= 1.001)).double()
    return -sequence_mean(kept * advantages * learner, record)


def opsm(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    dropped = (advantages < 0) & (-geometric_ratios(learner, record).log() > 0.1)
    surrogate = clipped_objective(ratios(learner, record), advantages, 0.8, 1.2)
    return -token_mean(surrogate * ~dropped, record)


def tba(learner: Tensor, record: PaddedBatch, rewards: Tensor) -> Tensor:
    """Half the loss of the paper times beta squared: the direction, in units of the reward."""
    beta, mask = 0.012, record.mask
    drift = ((learner - record.reference_logprobs) * mask).sum(1)
    log_z = (rewards / beta - drift).mean().detach()
    return beta * 0.5 * (log_z + drift - rewards / beta).square().mean()


def agro(learner: Tensor, record: PaddedBatch, rewards: Tensor) -> Tensor:
    """Half the variance of the regularized reward, over beta."""
    beta, mask = 0.1, record.mask
    drift = ((learner - record.reference_logprobs) * mask).sum(1)
    return 0.5 * (rewards - beta * drift).var(correction=0) / beta


def opmd(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    return -token_mean(advantages * learner, record)


def topr(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    tapered = sequence_ratios(learner, record).clamp(max=1.0).detach()
    return -sequence_sum(torch.where(advantages < 0, tapered, 1.0) * advantages * learner, record)


def kimi(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    tau = 0.1
    gaps = ((learner - record.rollout) * record.mask).sum(1)
    total = (learner * record.mask).sum(1)
    return -(advantages[:, 0] * total - tau / 2 * gaps.square()).mean()


def decoupled_ppo(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    behavior = ratios(learner, record).clamp(max=5.0).detach()
    proximal = (learner - learner.detach()).exp()
    return -token_mean(behavior * clipped_objective(proximal, advantages, 0.8, 1.2), record)


def a3po(learner: Tensor, record: PaddedBatch, advantages: Tensor) -> Tensor:
    """The record's lag is 3, so that alpha is 2/3."""
    gaps = learner - record.rollout
    proximal = (record.rollout + 2.0 / 3.0 * gaps).detach()
    behavior = (proximal - record.rollout).exp()
    return -token_mean(
        behavior * clipped_objective((learner - proximal).exp(), advantages, 0.8, 1.2), record
    )
