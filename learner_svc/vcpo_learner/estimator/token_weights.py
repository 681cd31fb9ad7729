r"""The weight of one trajectory's tokens: importance weight times aggregation.

    a_it = w_it / (divisor of the aggregation),    w from u_t = pi/mu, W = prod u, s = W^(1/T).

The weight depends on no advantage, no other trajectory and no mask over the batch, so the norm of
sum_t a_it grad log pi is the norm that the optimal baseline needs. The weight is held constant: no
gradient goes through it.

Sources: token and sequence truncation, Yao et al., "Your efficient RL framework secretly brings you
off-policy RL training" (2025), and VCPO, arXiv 2602.17616; masked form, IcePop (Ring-1T, arXiv
2510.18855); geometric ratio, GSPO, arXiv 2507.18071; CISPO, arXiv 2506.13585.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vcpo.algo.methods import Aggregation, LossConfig, Weight
from vcpo_learner.estimator.record import BatchRecord


def token_weights(record: BatchRecord, config: LossConfig) -> Tensor:
    """Return the weights a_it, [N] float64, at least 0; of a whole batch or of a part of one."""
    ratios = importance_weights(ratio_logs(record, config.weight), config)
    divisors = aggregation_divisors(record, config)
    if config.weight is Weight.TOKEN:
        return ratios / record.spread(divisors)
    return record.spread(ratios / divisors)


def importance_weights(log_ratios: Tensor, config: LossConfig) -> Tensor:
    """Return the ratios of target to behavior policy, capped or dropped as configured.

    log_ratios: [n] nats, of tokens or of trajectories.
    """
    cap = math.log(config.largest_weight)
    ratios = log_ratios.clamp(max=cap).exp()
    floor = math.log(config.weight_floor) if config.weight_floor > 0.0 else -math.inf
    is_dropped = (log_ratios < floor) | ((log_ratios > cap) & config.drops_above_cap)
    kept = torch.ones_like(ratios) if config.is_mask else ratios
    return kept.masked_fill(is_dropped, 0.0)


def ratio_logs(record: BatchRecord, weight: Weight) -> Tensor:
    """Return the logarithm of the ratio that a kind of weight uses, nats, untruncated.

    Returns: [N] for weights of tokens, else [B].
    """
    match weight:
        case Weight.NONE:
            return torch.zeros_like(record.rewards)
        case Weight.TOKEN:
            return record.log_ratios
        case Weight.SEQUENCE:
            return record.sums(record.log_ratios)
        case Weight.GEOMETRIC:
            return record.sums(record.log_ratios) / record.lengths


def aggregation_divisors(record: BatchRecord, config: LossConfig) -> Tensor:
    """Return what the aggregation divides the tokens of each trajectory by, [B]."""
    size = record.size
    match config.aggregation:
        case Aggregation.SEQUENCE_MEAN:
            return record.lengths.double() * size.trajectories
        case Aggregation.TOKEN_MEAN:
            divisor = size.tokens
        case Aggregation.SEQUENCE_SUM:
            divisor = size.trajectories
        case Aggregation.CONSTANT:
            divisor = size.trajectories * size.longest_response
    return torch.full_like(record.rewards, divisor)
