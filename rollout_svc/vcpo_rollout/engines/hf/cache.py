"""Keys and values of sequences that are decoded together, padded on the left.

All rows end in the same column, so one forward pass extends every one of them:

    column     0   1   2   3   4
    row 0      .   .   a   b   c     padding 2
    row 1      d   e   f   g   h     padding 0

Positions are counted from a row's first token and keys are rotated by them before they are stored.
A row's numbers therefore do not depend on its padding, which is widened when a longer row joins and
cut when the longest leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from vcpo_rollout.engines.hf.cache_layers import PreallocatedLayer


class DecodingCache:
    """The cache of one batch, owned by whoever decodes it.

    Every layer keeps all columns, sliding-window layers too: their mask hides what is out of the
    window. It costs memory that such a layer could save, and lets rows be joined and cut alike.
    """

    def __init__(self, model: PreTrainedModel, *, pad_token_id: int) -> None:
        self._model = model
        self._pad_token_id = pad_token_id
        self.clear()

    def clear(self) -> None:
        """Forget every row."""
        self._layers = Cache(layer_class_to_replicate=PreallocatedLayer)
        self._num_columns = 0
        self._padding: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> Tensor:
        """Append one token to each row; return the logits of the tokens after them, [rows, vocab].

        token_ids: one per row, in order.
        """
        self._num_columns += 1
        return self._forward([[token_id] for token_id in token_ids])

    def join(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Add rows below those held; return their next-token logits, [sequences, vocab].

        Only the new rows are computed, then keys and values are put under the old ones: a join
        costs the tokens of those who join, and one copy of the cache.

        sequences: token ids of each, at least one.
        """
        newcomers = DecodingCache(self._model, pad_token_id=self._pad_token_id)
        logits = newcomers._prefill(sequences)
        if self._padding:
            for layer, above in zip(newcomers._roomy(), self._roomy(), strict=True):
                layer.put_below(above)
        num_columns = max(self._num_columns, newcomers._num_columns)
        self._padding = [
            padding + num_columns - held._num_columns
            for held in (self, newcomers)
            for padding in held._padding
        ]
        self._layers, self._num_columns = newcomers._layers, num_columns
        return logits

    def remove(self, rows: Collection[int]) -> list[int]:
        """Drop rows; return which row is in each place now. The last ones fill the gaps."""
        kept = [row for row in range(len(self._padding)) if row not in rows]
        if not kept:
            self.clear()
            return []
        movers = iter([row for row in kept if row >= len(kept)])
        order = [next(movers) if place in rows else place for place in range(len(kept))]
        unused = min(self._padding[row] for row in kept)
        for layer in self._roomy():
            layer.keep(order, num_unused_columns=unused)
        self._padding = [self._padding[row] - unused for row in order]
        self._num_columns -= unused
        return order

    def _prefill(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        self._num_columns = max(map(len, sequences))
        self._padding = [self._num_columns - len(sequence) for sequence in sequences]
        return self._forward(
            [
                [self._pad_token_id] * padding + list(sequence)
                for padding, sequence in zip(self._padding, sequences, strict=True)
            ]
        )

    def _forward(self, token_ids: list[list[int]]) -> Tensor:
        """Run the newest columns; token_ids: [rows, new columns]. Returns [rows, vocab]."""
        device = self._model.device
        columns = torch.arange(self._num_columns, device=device)
        positions = columns - torch.tensor(self._padding, device=device)[:, None]
        num_new = len(token_ids[0])
        output = self._model(
            input_ids=torch.tensor(token_ids, device=device),
            attention_mask=positions >= 0,
            position_ids=positions[:, -num_new:].clamp(min=0),
            past_key_values=self._layers,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits
        return logits[:, -1]

    def _roomy(self) -> list[PreallocatedLayer]:
        return [layer for layer in self._layers.layers if isinstance(layer, PreallocatedLayer)]
