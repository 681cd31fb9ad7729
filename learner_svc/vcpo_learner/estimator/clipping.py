r"""Weights, clips and masks: what multiplies each token's gradient besides its advantage.

The factor g_it in k_it = -A_it a_it g_it is 0, 1 or another number of at least 0; it may depend on
the whole batch. PPO's surrogate min(u A, clip(u) A) has the gradient u A grad log pi as long as the
ratio has not left the band in the direction of A, and no gradient beyond. So a clip is a factor of
0 or 1 on REINFORCE with weight u.

Sources: PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729; OPSM, DeepSeek-V3.2, arXiv 2512.02556;
STAPO, arXiv 2602.15620 v5; TOPR, arXiv 2503.14286; A-3PO, arXiv 2512.06547; `bands` for the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vcpo.algo.ess.importance_weights import LARGEST_LOG_RATIO
from vcpo.algo.methods import Aggregation, Clipping, LossConfig, Weight
from vcpo_learner.estimator.record import BatchRecord


def token_weights(record: BatchRecord, config: LossConfig) -> Tensor:
    """Return the weights a_it, [N] float64, at least 0; of a whole batch or of a part of one.

    a_it = w_it / (divisor of the aggregation),    w from u_t = pi/mu, W = prod u, s = W^(1/T).
    The weight depends on no advantage, no other trajectory and no mask over the batch, so the norm
    of sum_t a_it grad log pi is the norm that the optimal baseline needs. It is held constant: no
    gradient goes through it.
    Sources: token and sequence truncation, Yao et al., "Your efficient RL framework secretly brings
    you off-policy RL training" (2025), and VCPO, arXiv 2602.17616; masked form, IcePop (Ring-1T,
    arXiv 2510.18855); geometric ratio, GSPO, arXiv 2507.18071; CISPO, arXiv 2506.13585.
    """
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


SPURIOUS_ENTROPY_QUANTILE: Final = 0.75
"""STAPO: quantile of the entropies of rewarded improbable tokens, below which one is spurious."""


def clip_factors(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    """Return the factor g_it on each token's gradient, [N] float64, at least 0.

    advantages: [N].
    """
    return _factors(record, advantages, config).to(advantages.dtype)


def _factors(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    """The factors as numbers, or as flags of tokens that keep their gradient."""
    match config.clipping:
        case Clipping.OPEN:
            return torch.ones_like(advantages)
        case Clipping.CLIP:
            return _clip(record, advantages, config)
        case Clipping.PROXIMAL_CLIP:
            return _proximal_clip(record, advantages, config)
        case Clipping.OFF_POLICY_MASK:
            became_improbable = -ratio_logs(record, Weight.GEOMETRIC) > config.threshold
            is_masked = (advantages < 0.0) & record.spread(became_improbable)
            return _clip(record, advantages, config) & ~is_masked
        case Clipping.SECOND_MOMENT:
            return _without_largest(record, _moved_outward(record, advantages), config)
        case Clipping.TAPERED:
            truncated = ratio_logs(record, Weight.SEQUENCE).clamp(max=0.0).exp()
            return torch.where(advantages < 0.0, record.spread(truncated), 1.0)
        case Clipping.SPURIOUS:
            return _without_spurious(record, advantages, config)
        case Clipping.BALANCED:
            ratios = _ratios(record, config)
            band = balanced_band(ratios, advantages, config.threshold)
            return _within(ratios, advantages, band, config)


def _clip(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    band = Band(low=1.0 - config.clip_low, high=1.0 + config.clip_high)
    return _within(_ratios(record, config), advantages, band, config)


def _proximal_clip(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    """The clip on pi over exp(log mu + alpha (log pi - log mu)), alpha = (lag - 1) / lag."""
    if record.lags is None:
        raise ValueError("lags is None: this clip needs one per token")
    log_ratios = record.log_ratios / record.lags.clamp(min=1)
    ratios = _exp(log_ratios.masked_fill(record.lags == 0, 0.0))
    band = Band(low=1.0 - config.clip_low, high=1.0 + config.clip_high)
    return _within(ratios, advantages, band, config)


def _without_spurious(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    """The clip without spurious tokens; the loss is then a mean over the tokens that are left."""
    if record.entropies is None:
        raise ValueError("entropies is None: this mask needs one per token")
    kept = _clip(record, advantages, config)
    is_improbable = record.learner_logprobs.double().exp() < config.threshold
    suspects = (advantages > 0.0) & is_improbable
    if not suspects.any():
        return kept
    level = record.entropies[suspects].quantile(SPURIOUS_ENTROPY_QUANTILE)
    is_spurious = suspects & (record.entropies < level)
    num_left = len(advantages) - int(is_spurious.sum())
    if num_left == 0:
        return torch.zeros_like(advantages)
    # In the precision of the advantages: two counts by themselves divide into a float32.
    return (kept & ~is_spurious).to(advantages.dtype) * len(advantages) / num_left


def _within(ratios: Tensor, advantages: Tensor, band: Band, config: LossConfig) -> Tensor:
    beyond_dual_clip = (advantages < 0.0) & (ratios > config.dual_clip)
    return active_within(ratios, advantages, band) & ~beyond_dual_clip


def _ratios(record: BatchRecord, config: LossConfig) -> Tensor:
    ratios = _exp(ratio_logs(record, config.weight))
    return ratios if config.weight is Weight.TOKEN else record.spread(ratios)


def _exp(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(max=LARGEST_LOG_RATIO).exp()


def _moved_outward(record: BatchRecord, advantages: Tensor) -> Tensor:
    log_ratios = record.log_ratios
    return ((advantages > 0.0) & (log_ratios > 0.0)) | ((advantages < 0.0) & (log_ratios < 0.0))


def _without_largest(record: BatchRecord, among: Tensor, config: LossConfig) -> Tensor:
    kept = torch.ones_like(among)
    kept[among] = second_moment_mask(record.log_ratios[among], config.threshold)
    return kept


_LOW_START, _LOW_END, _LOW_STEP = 0.6, 0.9, 0.02
_HIGH_START, _HIGH_END, _HIGH_STEP = 1.2, 3.0, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The interval of ratios in which a token always has a gradient; BAPO's balance moves it.

    Source: BAPO, arXiv 2510.18927.
    """

    low: float
    high: float


def second_moment_mask(log_ratios: Tensor, bound: float) -> Tensor:
    """Return which tokens remain if the largest are dropped until the mean square is in bounds.

    Source: M2PO, arXiv 2510.01161 (the paper; the official code differs).
    log_ratios: [n] nats. bound: of mean(log_ratios^2) over the remaining tokens.
    Returns: [n] bool. Of equal log ratios the later ones are dropped first.
    """
    if log_ratios.numel() == 0:
        return torch.zeros_like(log_ratios, dtype=torch.bool)
    order = log_ratios.abs().sort(stable=True).indices
    squares = log_ratios[order].square()
    counts = torch.arange(1, len(squares) + 1, dtype=squares.dtype, device=squares.device)
    means = squares.cumsum(dim=0) / counts
    # Means of the smallest ones rise with their number, so those within come first.
    count = int((means <= bound).sum())
    kept = torch.zeros_like(log_ratios, dtype=torch.bool)
    kept[order[:count]] = True
    return kept


def balanced_band(ratios: Tensor, advantages: Tensor, share: float) -> Band:
    """Return the band in which positive advantages give at least `share` of the gradient.

    ratios, advantages: [n]. Starts at (0.6, 1.2); the upper end goes up to 3, then the lower end up
    to 0.9, until the share is reached.
    Departure from BAPO's paper, which also counts clipped tokens: raising the lower end then raises
    the weight of tokens without a gradient, against the aim of the search. Only tokens with a
    gradient count here.
    """
    sizes = ratios * advantages.abs()

    def positive_share(band: Band) -> float:
        is_active = active_within(ratios, advantages, band)
        return _share(sizes * is_active, advantages > 0.0)

    return _search(positive_share, share)


def active_within(ratios: Tensor, advantages: Tensor, band: Band) -> Tensor:
    """Return which tokens have a gradient under PPO's clipped surrogate, [n] bool."""
    leaves_above = (advantages > 0.0) & (ratios > band.high)
    leaves_below = (advantages < 0.0) & (ratios < band.low)
    return ~(leaves_above | leaves_below)


def _share(sizes: Tensor, is_positive: Tensor) -> float:
    total = float(sizes.sum())
    return float(sizes[is_positive].sum()) / total if total > 0.0 else 1.0


def _search(positive_share: Callable[[Band], float], share: float) -> Band:
    low_steps = high_steps = 0
    band = Band(low=_LOW_START, high=_HIGH_START)
    while positive_share(band) < share and band.low < _LOW_END:
        if band.high < _HIGH_END:
            high_steps += 1
        else:
            low_steps += 1
        band = Band(
            low=min(_LOW_START + low_steps * _LOW_STEP, _LOW_END),
            high=min(_HIGH_START + high_steps * _HIGH_STEP, _HIGH_END),
        )
    return band
