"""Rows of each trajectory's head gradient at the tokens that it has read, for tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vcpo_learner.device import to_device


@dataclass(slots=True, kw_only=True, eq=False)
class OwnRows:
    """Rows G_i[x] of each trajectory i, for every token x that it has read, each once."""

    num_tokens: int
    """Size of the vocabulary."""
    keys: Tensor
    """[rows] int64 trajectory * num_tokens + token, ascending."""
    rows: Tensor
    """[rows, hidden] filled tile by tile; 0 where no gradient arrived."""
    _columns: Tensor
    """[rows] int64 the token's column in its tile."""
    _places: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """First and last row of a trajectory in a tile, by (trajectory, first token of the tile)."""

    def take(self, trajectory: int, vocabulary: slice, tile: Tensor) -> None:
        """Copy the rows that a tile [rows, hidden] of the gradient holds."""
        first, last = self._places[trajectory, vocabulary.start]
        if first < last:
            self.rows[first:last] = tile[self._columns[first:last]]

    def take_products(
        self, trajectory: int, vocabulary: slice, gradient: Tensor, hidden: Tensor
    ) -> None:
        """Form the rows that a tile holds from D [tokens, rows] and the tokens' hidden states."""
        first, last = self._places[trajectory, vocabulary.start]
        if first < last:
            chosen = gradient[:, self._columns[first:last]]
            torch.mm(chosen.mT, hidden.to(chosen.dtype), out=self.rows[first:last])

    def inner_products(self, token_ids: Tensor, gradients: Tensor) -> Tensor:
        """Return <G_i, E_i> [batch] float64, with E_i the gradient of the embedding.

        token_ids: [batch, tokens] that the trajectories have read, and padding.
        gradients: [batch, tokens, hidden] at their embeddings; 0 at padding.
        """
        numbers = torch.arange(len(token_ids), device=token_ids.device)[:, None]
        wanted = numbers * self.num_tokens + token_ids
        places = torch.searchsorted(self.keys, wanted).clamp_max(len(self.keys) - 1)
        # Padding has any token, and a gradient of 0.
        is_padding = self.keys[places] != wanted
        found = self.rows[places].masked_fill(is_padding[..., None], 0.0)
        products: Tensor = torch.linalg.vecdot(found, gradients.to(found.dtype))
        return products.sum(dim=1, dtype=torch.float64)


def own_rows(
    token_ids: Tensor, is_token: Tensor, head: Tensor, rows_per_tile: int, dtype: torch.dtype
) -> OwnRows:
    """Return the rows to fill, all 0.

    token_ids, is_token: [batch, width] what the trajectories have read; False for padding.
    head: [vocabulary, hidden] matrix.
    dtype: of the rows.
    """
    batch, vocabulary = len(token_ids), len(head)
    numbers = torch.arange(batch, device=token_ids.device)[:, None] * vocabulary
    keys = torch.unique((numbers + token_ids)[is_token])
    starts = list(range(0, vocabulary, rows_per_tile))
    edges = numbers + to_device(torch.tensor([*starts, vocabulary]), keys.device)
    places = torch.searchsorted(keys, edges).tolist()
    return OwnRows(
        num_tokens=vocabulary,
        keys=keys,
        rows=head.new_zeros(len(keys), head.shape[1], dtype=dtype),
        _columns=keys % vocabulary % rows_per_tile,
        _places={
            (trajectory, start): (row[at], row[at + 1])
            for trajectory, row in enumerate(places)
            for at, start in enumerate(starts)
        },
    )
