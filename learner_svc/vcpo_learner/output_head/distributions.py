r"""What is needed of each token's softmax, from sums that are kept while tiles go by.

Over the logits L_v of one token, with m the largest so far:

    s = sum_v e^(L_v - m)                  log-probability: L_y - m - log s
    r = sum_v e^(L_v - m) dL_v/du W_v      its gradient at the hidden state: dL_y/du W_y - r / s
    q = sum_v e^(L_v - m) (L_v - m)        entropy: log s - q / s

When m grows by d, all of them shrink: s and r by e^-d, and q becomes e^-d (q - d s).
Keeping r costs a second product with W here and saves one in the backward pass.

Sources: Milakov and Gimelshein, arXiv 1805.02867 (online softmax); Dao et al., arXiv 2205.14135
(the weighted sum r beside it, for attention).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo_learner.output_head.logit_tiles import Finish, Tile, TiledLogits, finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to compute beside the log-probabilities."""

    directions: bool = False
    entropies: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenDistributions:
    """Numbers of each token's distribution; all without a graph, None if not wanted."""

    logprobs: Tensor
    """[tokens] nats, at most 0, of the sampled token."""
    log_normalizers: Tensor
    """[tokens] log sum_v e^L_v."""
    directions: Tensor | None
    """[tokens, hidden] gradient of the log-probability at the hidden state."""
    entropies: Tensor | None
    """[tokens] nats, at least 0."""


def token_distributions(logits: TiledLogits, targets: Tensor, wanted: Wanted) -> TokenDistributions:
    """Go over all tiles once.

    targets: [tokens] int64 sampled tokens.
    """
    dtype, count = logits.dtype, logits.num_tokens
    largest = logits.hidden.new_full((count,), -torch.inf, dtype=dtype)
    sums = _Sums(
        largest=largest,
        total=torch.zeros_like(largest),
        rows=_zeros(logits.hidden, dtype) if wanted.directions else None,
        surprise=torch.zeros_like(largest) if wanted.entropies else None,
    )
    memory = logits.memory()
    for block in logits.token_blocks():
        part, tokens = sums.part(block), logits.factors(logits.hidden[block])
        for vocabulary in logits.vocabulary_blocks():
            part.add(logits, logits.tile(tokens, vocabulary, memory))
    return _finish_sums(logits, targets, sums)


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sums:
    """The sums of the module's first lines; changed in place."""

    largest: Tensor
    total: Tensor
    rows: Tensor | None
    surprise: Tensor | None

    def part(self, tokens: slice) -> _Sums:
        return _Sums(
            largest=self.largest[tokens],
            total=self.total[tokens],
            rows=None if self.rows is None else self.rows[tokens],
            surprise=None if self.surprise is None else self.surprise[tokens],
        )

    def add(self, logits: TiledLogits, tile: Tile) -> None:
        """Add a tile; its products are overwritten."""
        dtype = None if self.rows is None else logits.input_dtype
        sums = self.largest, self.total, self.surprise
        shrink, odds = logits.run(_add_tile, tile.products, tile.finish, *sums, dtype)
        if self.rows is not None:
            self.rows.mul_(shrink[:, None])
            logits.add_product(self.rows, logits.factors(odds), tile.weight)


def _add_tile(
    products: Tensor,
    finish: Finish,
    largest: Tensor,
    total: Tensor,
    surprise: Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Add a tile to the sums [tokens] in place.

    Return what the sums of rows shrink by [tokens], and the weights [tokens, rows] of the tile's
    rows in them; None without a number type for them.
    """
    logits, slopes = finished(products, finish)
    new = torch.maximum(largest, logits.amax(dim=1))
    shrink = (largest - new).exp_()
    exponents = logits.sub_(new[:, None])
    if surprise is None:
        odds = exponents.exp_()
    else:
        odds = exponents.exp()
        # Nothing has been added before the first tile, and no distance to it exists.
        distance = (largest - new).nan_to_num_(neginf=0.0)
        surprise.addcmul_(distance, total).mul_(shrink).add_(exponents.mul_(odds).sum(dim=1))
    total.mul_(shrink).add_(odds.sum(dim=1))
    largest.copy_(new)
    if dtype is None:
        return shrink, None
    if isinstance(slopes, Tensor):
        odds.mul_(slopes)
    return shrink, odds.to(dtype)


def _finish_sums(logits: TiledLogits, targets: Tensor, sums: _Sums) -> TokenDistributions:
    own_rows = logits.factors(logits.weight[targets]).to(logits.dtype)
    hidden = logits.factors(logits.hidden).to(logits.dtype)
    sampled = torch.linalg.vecdot(hidden, own_rows)
    own_bias = None if logits.bias is None else logits.bias[targets]
    finish = Finish(logits.form, logits.temperature, bias=own_bias)
    sampled, own_slopes = finished(sampled, finish)
    log_total = sums.total.log()
    log_normalizers = sums.largest + log_total
    # Rounding may leave the log-probability of a token that is all but certain just over zero.
    logprobs = (sampled - log_normalizers).clamp_max_(0.0)
    return TokenDistributions(
        logprobs=logprobs,
        log_normalizers=log_normalizers,
        directions=_directions(sums, own_rows, own_slopes),
        entropies=None
        if sums.surprise is None
        else (log_total - sums.surprise / sums.total).clamp_min_(0.0),
    )


def _directions(sums: _Sums, own_rows: Tensor, own_slopes: Tensor | float) -> Tensor | None:
    if sums.rows is None:
        return None
    mean = sums.rows.div_(sums.total[:, None])
    if isinstance(own_slopes, Tensor):
        return own_rows.mul_(own_slopes[:, None]).sub_(mean)
    return own_rows.sub_(mean).mul_(own_slopes)
