"""Keys and values of sequences that are decoded together, padded on the left.

All rows end in the same column, so one forward pass extends every one of them:

    column     0   1   2   3   4
    row 0      .   .   a   b   c     padding 2
    row 1      d   e   f   g   h     padding 0

Positions are counted from a row's first token and keys are rotated by them before they are stored.
A row's numbers therefore do not depend on its padding, which may be widened when a longer row joins
and cut when the longest leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel


class DecodingCache:
    """The cache of one batch, owned by whoever decodes it.

    Every layer keeps all columns, sliding-window layers too: their mask hides what is out of the
    window. It costs memory that such a layer could save, and lets rows be joined and cut alike.
    """

    def __init__(self, model: PreTrainedModel, *, pad_token_id: int) -> None:
        self._model = model
        self._pad_token_id = pad_token_id
        self._layers = DynamicCache()
        self._num_columns = 0
        self._padding: list[int] = []

    @property
    def num_rows(self) -> int:
        """Sequences held."""
        return len(self._padding)

    @property
    def num_columns(self) -> int:
        """Tokens of the longest sequence held."""
        return self._num_columns

    def clear(self) -> None:
        """Forget every row."""
        self._layers, self._num_columns, self._padding = DynamicCache(), 0, []

    def extend(self, token_ids: Sequence[int]) -> Tensor:
        """Append one token to each row; return the logits of the tokens after them, [rows, vocab].

        token_ids: one per row, in order.
        """
        self._num_columns += 1
        return self._forward([[token_id] for token_id in token_ids])

    def join(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Add rows below those held; return their next-token logits, [sequences, vocab].

        Only the new rows are computed: their keys and values are then put under the old ones, so a
        join costs their own tokens and one copy of the cache, which every step costs anyway.

        sequences: token ids of each, at least one.
        """
        newcomers = DecodingCache(self._model, pad_token_id=self._pad_token_id)
        logits = newcomers._prefill(sequences)
        if self.num_rows:
            num_columns = max(self._num_columns, newcomers._num_columns)
            self._widen(num_columns)
            newcomers._widen(num_columns)
            self._stack(newcomers)
        else:
            self._layers, self._num_columns = newcomers._layers, newcomers._num_columns
        self._padding += newcomers._padding
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, and the columns that none of these uses."""
        if not rows:
            self.clear()
            return
        padding = [self._padding[row] for row in rows]
        unused = min(padding)
        index = torch.tensor(rows, device=self._model.device)
        self._replace(lambda states: states[index, :, unused:])
        self._padding = [columns - unused for columns in padding]
        self._num_columns -= unused

    def _prefill(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        self._num_columns = max(map(len, sequences))
        self._padding = [self._num_columns - len(sequence) for sequence in sequences]
        return self._forward(
            [
                [self._pad_token_id] * columns + list(sequence)
                for columns, sequence in zip(self._padding, sequences, strict=True)
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

    def _widen(self, num_columns: int) -> None:
        """Add padding on the left, up to this many columns."""
        extra = num_columns - self._num_columns
        if extra:
            # `pad` counts from the last dimension: nothing in the head, `extra` before the columns.
            self._replace(lambda states: pad(states, (0, 0, extra, 0)))
            self._padding = [columns + extra for columns in self._padding]
            self._num_columns = num_columns

    def _stack(self, below: DecodingCache) -> None:
        """Put the rows of a cache with as many columns under these."""
        for layer, other in zip(self._layers.layers, below._layers.layers, strict=True):
            for name, states in _states(layer).items():
                setattr(layer, name, torch.cat((states, getattr(other, name))))

    def _replace(self, function: Callable[[Tensor], Tensor]) -> None:
        """Put `function(states)` for the keys and values of every layer."""
        for layer in self._layers.layers:
            for name, states in _states(layer).items():
                setattr(layer, name, function(states))


def _states(layer: object) -> dict[str, Tensor]:
    """Keys and values of a layer, [rows, heads, columns, head], under their attributes' names.

    Empty for a layer that reads another one's. The library types its layers too widely to say so.
    """
    states = {name: getattr(layer, name, None) for name in ("keys", "values")}
    return {name: tensor for name, tensor in states.items() if tensor is not None}
