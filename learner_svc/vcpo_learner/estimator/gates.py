r"""What of each token's gradient a method lets through, given its advantage.

A gate is g_it in -A_it a_it g_it: 1, 0, or a factor. It may look at the whole batch. PPO's
surrogate min(u A, clip(u) A) has the gradient u A grad log pi where the ratio has not left the band
in the direction of A, and none where it has; so a clip is a gate on REINFORCE with weight u.

Sources: PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729; OPSM, DeepSeek-V3.2, arXiv 2512.02556;
STAPO, arXiv 2602.15620 v5; TOPR, arXiv 2503.14286; A-3PO, arXiv 2512.06547; `bands` for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from vcpo.algo import Clipping, LossConfig, Weight
from vcpo.algo.ess.importance_weights import LARGEST_LOG_RATIO
from vcpo_learner.estimator.bands import (
    Band,
    active_within,
    balanced_band,
    kept_by_second_moment,
    published_balanced_band,
    second_moment_band,
)
from vcpo_learner.estimator.record import BatchRecord
from vcpo_learner.estimator.weights import ratio_logs

SPURIOUS_ENTROPY_QUANTILE: Final = 0.75
"""STAPO: of the entropies of rewarded improbable tokens, below which one is spurious."""


def gate(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    """Factor g_it on each token's gradient, [B, width], at least 0; 0 outside the mask.

    advantages: [B, width].
    """
    factors = _GATES[config.clipping](record, advantages, config)
    return factors.to(advantages.dtype) * record.logprobs.mask


def _open(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    return torch.ones_like(advantages)


def _clip(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    band = Band(low=1.0 - config.clip_low, high=1.0 + config.clip_high)
    return _within(_ratios(record, config), advantages, band, config)


def _proximal_clip(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    """The clip on pi over exp(log mu + alpha (log pi - log mu)), alpha = (lag - 1) / lag."""
    log_ratios = record.logprobs.log_ratios / record.lags.clamp(min=1)
    ratios = _exp(log_ratios.masked_fill(record.lags == 0, 0.0))
    band = Band(low=1.0 - config.clip_low, high=1.0 + config.clip_high)
    return _within(ratios, advantages, band, config)


def _off_policy_mask(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    left_behind = -ratio_logs(record.logprobs, Weight.GEOMETRIC) > config.threshold
    is_masked = (advantages < 0.0) & left_behind
    return _clip(record, advantages, config).masked_fill(is_masked, 0.0)


def _second_moment(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    pushed_out = _pushed_out(record, advantages)
    return _without_largest(record, pushed_out, config, keeps_one=False)


def _second_moment_all(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    kept = _without_largest(record, record.logprobs.mask, config, keeps_one=True)
    return kept & _clip(record, advantages, config)


def _second_moment_bounds(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    log_ratios = record.logprobs.log_ratios[_pushed_out(record, advantages)]
    band = second_moment_band(log_ratios, config.threshold)
    return _within(_ratios(record, config), advantages, band, config)


def _balanced(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    ratios, mask = _ratios(record, config), record.logprobs.mask
    band = balanced_band(ratios[mask], advantages[mask], config.threshold)
    return _within(ratios, advantages, band, config)


def _balanced_published(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    ratios, mask = _ratios(record, config), record.logprobs.mask
    probabilities = record.logprobs.rollout[mask].exp()
    band = published_balanced_band(ratios[mask], advantages[mask], probabilities, config.threshold)
    return _within(ratios, advantages, band, config)


def _spurious(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    """The clip without spurious tokens; the mean is over the tokens that survive the mask."""
    if record.entropies is None:
        raise ValueError("entropies is None: this gate needs one per token")
    mask = record.logprobs.mask
    improbable = record.logprobs.learner.exp() < config.threshold
    suspects = mask & (advantages > 0.0) & improbable
    if not suspects.any():
        return _clip(record, advantages, config)
    level = record.entropies[suspects].quantile(SPURIOUS_ENTROPY_QUANTILE)
    spurious = suspects & (record.entropies < level)
    num_kept = (mask & ~spurious).sum()
    if num_kept == 0:
        return torch.zeros_like(advantages)
    kept = _clip(record, advantages, config).masked_fill(spurious, 0.0)
    # In the precision of the advantages: two counts by themselves divide into a float32.
    return kept.to(advantages.dtype) * mask.sum() / num_kept


def _tapered(record: BatchRecord, advantages: Tensor, config: LossConfig) -> Tensor:
    truncated = ratio_logs(record.logprobs, Weight.SEQUENCE).clamp(max=0.0).exp()
    return torch.where(advantages < 0.0, truncated, 1.0)


_GATES: Final[Mapping[Clipping, Callable[[BatchRecord, Tensor, LossConfig], Tensor]]] = (
    MappingProxyType(
        {
            Clipping.OPEN: _open,
            Clipping.CLIP: _clip,
            Clipping.PROXIMAL_CLIP: _proximal_clip,
            Clipping.OFF_POLICY_MASK: _off_policy_mask,
            Clipping.SECOND_MOMENT: _second_moment,
            Clipping.SECOND_MOMENT_ALL: _second_moment_all,
            Clipping.SECOND_MOMENT_BOUNDS: _second_moment_bounds,
            Clipping.BALANCED: _balanced,
            Clipping.BALANCED_PUBLISHED: _balanced_published,
            Clipping.SPURIOUS: _spurious,
            Clipping.TAPERED: _tapered,
        }
    )
)


def _within(ratios: Tensor, advantages: Tensor, band: Band, config: LossConfig) -> Tensor:
    beyond_dual_clip = (advantages < 0.0) & (ratios > config.dual_clip)
    return active_within(ratios, advantages, band) & ~beyond_dual_clip


def _ratios(record: BatchRecord, config: LossConfig) -> Tensor:
    """The ratio that the config's weight is about, before any cap, [B, width]."""
    return _exp(ratio_logs(record.logprobs, config.weight))


def _exp(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(max=LARGEST_LOG_RATIO).exp()


def _pushed_out(record: BatchRecord, advantages: Tensor) -> Tensor:
    """Tokens that the advantage moves further from the sampler, [B, width] bool."""
    log_ratios = record.logprobs.log_ratios
    outward = ((advantages > 0.0) & (log_ratios > 0.0)) | ((advantages < 0.0) & (log_ratios < 0.0))
    return outward & record.logprobs.mask


def _without_largest(
    record: BatchRecord, among: Tensor, config: LossConfig, *, keeps_one: bool
) -> Tensor:
    kept = torch.ones_like(among)
    log_ratios = record.logprobs.log_ratios[among]
    kept[among] = kept_by_second_moment(log_ratios, config.threshold, keeps_one=keeps_one)
    return kept
