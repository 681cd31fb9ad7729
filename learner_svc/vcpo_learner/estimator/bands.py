r"""Trust regions found from the batch itself: M2PO's second moment and BAPO's balance.

Sources: the second moment, M2PO, arXiv 2510.01161 (the paper; the official code differs); the
balance, BAPO, arXiv 2510.18927.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_LOW_START, _LOW_END, _LOW_STEP = 0.6, 0.9, 0.02
_HIGH_START, _HIGH_END, _HIGH_STEP = 1.2, 3.0, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The interval of ratios in which a token always has a gradient."""

    low: float
    high: float


def second_moment_mask(log_ratios: Tensor, bound: float) -> Tensor:
    """Return which tokens remain if the largest are dropped until the mean square is in bounds.

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
