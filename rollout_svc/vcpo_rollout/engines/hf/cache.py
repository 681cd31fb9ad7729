"""Keys, values and recurrent states of sequences decoded together, padded on the left.

All rows end in the same column, so one forward pass extends every row. Positions count from a
row's first token, and keys are rotated by them before they are stored. A row's states therefore do
not depend on its padding. The padding grows when a longer row joins, and shrinks when the longest
row is removed.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vcpo_rollout.engines.hf.cache_layers import PreallocatedLayer, RecurrentLayer, cache_for
from vcpo_rollout.engines.hf.routes import RouteRecorder

_Row = TypeVar("_Row")

_MASK_ELEMENTS: Final = 1 << 28
"""Elements of a mask, rows x columns x columns, of the rows that are read at a time: 256 MiB."""

_CHUNK: Final = 64
"""Tokens of a chunk of the delta rule."""


class DecodingCache:
    """The cache of one batch. Owner: the thread that decodes the batch.

    Every layer keeps all columns; the mask of a sliding-window layer hides those outside its
    window. Such a layer could use less memory, but all rows join and leave in the same way.
    """

    def __init__(
        self, model: PreTrainedModel, *, pad_token_id: int, recorder: RouteRecorder | None = None
    ) -> None:
        """recorder: of the model's routes; None if nobody wants them."""
        self._model = model
        self._pad_token_id = pad_token_id
        self._recorder = recorder
        self._newest_routes: list[Tensor] = []
        """Routes of the rows that the last call computed."""
        self.clear()

    @property
    def chunk_tokens(self) -> int:
        """Tokens after which recurrent layers hand their state on; 0 if the model has none."""
        if not any(isinstance(each, RecurrentLayer) for each in self._layers.layers):
            return 0
        return max(getattr(each, "chunk_size", 0) or _CHUNK for each in self._model.modules())

    def clear(self) -> None:
        self._layers = cache_for(self._model.config)
        self._num_columns = 0
        self._padding: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> Tensor:
        """Append one token to each row; return the next-token logits, [rows, vocab].

        token_ids: one per row, in order.
        """
        self._num_columns += 1
        return self._forward([[token_id] for token_id in token_ids])

    def join(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Add rows below the present ones; return their next-token logits, [sequences, vocab].

        Only the new rows are computed, equal ones once, as the prompt of a group; their keys and
        values are then put below the old ones. A join costs the tokens of the new rows and one
        copy of the cache, or a few if the rows are so long that not all are read at once.

        sequences: token ids of each, at least one.
        """
        logits: list[Tensor] = []
        newest_routes: list[Tensor] = []
        for part in _read_together(sequences):
            logits.append(self._join(part))
            newest_routes += self._newest_routes
        self._newest_routes = newest_routes
        return torch.cat(logits)

    def _join(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        joining = DecodingCache(
            self._model, pad_token_id=self._pad_token_id, recorder=self._recorder
        )
        distinct = {
            sequence: row for row, sequence in enumerate(dict.fromkeys(map(tuple, sequences)))
        }
        logits = joining._prefill(list(distinct))
        if len(distinct) < len(sequences):
            rows = [distinct[tuple(sequence)] for sequence in sequences]
            joining._repeat(rows)
            logits = logits[rows]
        if self._padding:
            for layer, above in zip(joining._own_layers(), self._own_layers(), strict=True):
                layer.put_below(above)
        num_columns = max(self._num_columns, joining._num_columns)
        self._padding = [
            padding + num_columns - cache._num_columns
            for cache in (self, joining)
            for padding in cache._padding
        ]
        self._layers, self._num_columns = joining._layers, num_columns
        self._newest_routes = joining._newest_routes
        return logits

    def newest_routes_of(self, rows: Sequence[_Row]) -> Iterator[tuple[_Row, Tensor]]:
        """Yield the rows that the last call computed, each with the experts of its new tokens.

        rows: what stands for each of them; the experts are [tokens, layers, choices]. Yields none
            if nobody records routes.
        """
        if self._recorder is not None:
            yield from zip(rows, self._newest_routes, strict=True)

    def remove(self, rows: Collection[int]) -> list[int]:
        """Remove rows; the last rows fill the gaps. Return the old row at each new index."""
        kept = [row for row in range(len(self._padding)) if row not in rows]
        if not kept:
            self.clear()
            return []
        movers = iter([row for row in kept if row >= len(kept)])
        order = [next(movers) if index in rows else index for index in range(len(kept))]
        unused = min(self._padding[row] for row in kept)
        for layer in self._own_layers():
            layer.keep(order, num_unused_columns=unused)
        self._padding = [self._padding[row] - unused for row in order]
        self._num_columns -= unused
        return order

    def _repeat(self, rows: Sequence[int]) -> None:
        """Make copies of these rows the only ones."""
        for layer in self._own_layers():
            layer.repeat(rows)
        self._padding = [self._padding[row] for row in rows]
        if self._recorder is not None:
            self._newest_routes = [self._newest_routes[row] for row in rows]

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
        """Compute the newest columns; token_ids: [rows, new columns]. Returns [rows, vocab]."""
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
            # A slice of states is not contiguous: a CPU would copy the head for each row.
            logits_to_keep=columns[num_new - 1 : num_new],
        )
        if self._recorder is not None:
            starts = [max(0, padding - self._num_columns + num_new) for padding in self._padding]
            computed = self._recorder.take(len(token_ids))
            self._newest_routes = [
                routes[start:] for routes, start in zip(computed, starts, strict=True)
            ]
        logits: Tensor = output.logits
        return logits[:, -1]

    def _own_layers(self) -> list[PreallocatedLayer | RecurrentLayer]:
        kinds = PreallocatedLayer | RecurrentLayer
        return [layer for layer in self._layers.layers if isinstance(layer, kinds)]


def _read_together(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Yield the sequences in their order, as many at a time as a mask has room for; at least one.

    Equal ones count once.
    """
    part: list[Sequence[int]] = []
    distinct: set[tuple[int, ...]] = set()
    for sequence in sequences:
        grown = distinct | {tuple(sequence)}
        if part and len(grown) * max(map(len, grown)) ** 2 > _MASK_ELEMENTS:
            yield part
            part, grown = [], {tuple(sequence)}
        part.append(sequence)
        distinct = grown
    yield part
