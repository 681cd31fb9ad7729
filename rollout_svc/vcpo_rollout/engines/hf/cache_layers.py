"""Layers of a cache whose rows join, move and leave: keys and values, recurrent states, or both.

Keys and values are in preallocated storage: appending a token or removing a row does not copy all.

The library's `DynamicLayer` copies its whole content for each new token. These layers reserve
columns to the right, and overwrite a removed row with the last one:

    column    0   1   2   3   4   5   6
    row 0     a   b   c   d   -   -   -      - is reserved and not yet part of the states
    row 1     e   f   g   h   -   -   -

A recurrent state has no columns. Padding on the left leaves it 0, as families put zeros there; a
model whose layers do not is refused before its first token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)


class States:
    """Keys, or values, of one layer: [rows, heads, columns, head]."""

    def __init__(self, states: Tensor) -> None:
        self._storage = states
        self._first = 0
        self._end = states.shape[2]

    @property
    def tensor(self) -> Tensor:
        return self._storage[:, :, self._first : self._end]

    def append(self, columns: Tensor) -> None:
        """Append columns on the right; if there is no room, reserve a quarter more than needed."""
        num_new = columns.shape[2]
        if self._end + num_new > self._storage.shape[2]:
            held = self.tensor
            num_columns = held.shape[2] + num_new
            self._reserve(held, num_rows=held.shape[0], num_columns=num_columns)
            self._storage[:, :, : held.shape[2]] = held
            self._end = held.shape[2]
        self._storage[:, :, self._end : self._end + num_new] = columns
        self._end += num_new

    def keep(self, rows: Sequence[int], *, num_unused_columns: int) -> None:
        """Put row `rows[i]` at index i, and drop all other rows and columns on the left.

        rows: each is either its own index or at least `len(rows)`, so no move overwrites another.
        """
        moved = [index for index, row in enumerate(rows) if row != index]
        if moved:
            self._storage[moved] = self._storage[[rows[index] for index in moved]]
        self._storage = self._storage[: len(rows)]
        self._first += num_unused_columns

    def repeat(self, rows: Sequence[int]) -> None:
        self._storage = self._storage[rows]

    def put_below(self, above: Tensor) -> None:
        """Put these rows below others; all end in the same column, with zeros on the left.

        The padding must be finite, since attention also multiplies what it masks.
        """
        below, num_above = self.tensor, above.shape[0]
        num_columns = max(above.shape[2], below.shape[2])
        self._reserve(below, num_rows=num_above + below.shape[0], num_columns=num_columns)
        self._storage[:num_above, :, num_columns - above.shape[2] : num_columns] = above
        self._storage[num_above:, :, num_columns - below.shape[2] : num_columns] = below
        self._end = num_columns

    def _reserve(self, like: Tensor, *, num_rows: int, num_columns: int) -> None:
        _, heads, _, head_size = like.shape
        capacity = num_columns + num_columns // 4 + 16
        self._storage = like.new_zeros((num_rows, heads, capacity, head_size))
        self._first = 0


class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its base is not annotated
    """A layer of a `transformers` cache with preallocated storage.

    `keys` and `values` are views of the stored states; the library reads their shape.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # its base is not annotated
        self._stored: dict[str, States] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns and return all states; the model's attention calls this method."""
        self.is_initialized = True
        self.keys, self.values = (
            self._append(name, columns)
            for name, columns in (("keys", key_states), ("values", value_states))
        )
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append an indexer's keys [rows, columns, size] and return all; the model calls this."""
        return self._append("indexer", indexer_key_states[:, None])[:, 0]

    def keep(self, rows: Sequence[int], *, num_unused_columns: int) -> None:
        """Drop rows and columns, as `States.keep` describes."""
        for states in self._stored.values():
            states.keep(rows, num_unused_columns=num_unused_columns)
        self._refresh_views()

    def repeat(self, rows: Sequence[int]) -> None:
        """Make copies of these rows the only ones."""
        for states in self._stored.values():
            states.repeat(rows)
        self._refresh_views()

    def put_below(self, above: Any) -> None:
        """Put these rows below another such layer's, as `States.put_below` describes."""
        for name, states in self._stored.items():
            states.put_below(above._stored[name].tensor)
        self._refresh_views()

    def _append(self, name: str, columns: Tensor) -> Tensor:
        if name in self._stored:
            self._stored[name].append(columns)
        else:
            self._stored[name] = States(columns)
        return self._stored[name].tensor

    def _refresh_views(self) -> None:
        if self.is_initialized:
            self.keys, self.values = (self._stored[name].tensor for name in ("keys", "values"))


class RecurrentLayer(LinearAttentionLayer):
    """A layer whose states have one entry for each row, or none: a feed-forward layer's."""

    def keep(self, rows: Sequence[int], *, num_unused_columns: int) -> None:
        """Put row `rows[i]` at index i, and drop all other rows; there are no columns."""
        del num_unused_columns
        self.repeat(rows)

    def repeat(self, rows: Sequence[int]) -> None:
        """Make copies of these rows the only ones."""
        for states in (self.conv_states, self.recurrent_states):
            states |= {at: each[list(rows)] for at, each in states.items() if each is not None}

    def put_below(self, above: Any) -> None:
        """Put these rows below another such layer's."""
        for kind in ("conv_states", "recurrent_states"):
            states, others = getattr(self, kind), getattr(above, kind)
            states |= {
                at: torch.cat([others[at], each]) for at, each in states.items() if each is not None
            }


# Its bases disagree on what they do not annotate.
class HybridLayer(RecurrentLayer, PreallocatedLayer):  # type: ignore[misc, no-untyped-call, override]
    """A layer with recurrent states, and keys and values beside them."""

    is_compileable = False

    def __init__(self, number_of_states: int) -> None:
        PreallocatedLayer.__init__(self)
        RecurrentLayer.__init__(self, number_of_states)

    def keep(self, rows: Sequence[int], *, num_unused_columns: int) -> None:
        """Drop rows and columns."""
        RecurrentLayer.repeat(self, rows)
        PreallocatedLayer.keep(self, rows, num_unused_columns=num_unused_columns)

    def repeat(self, rows: Sequence[int]) -> None:
        """Make copies of these rows the only ones."""
        RecurrentLayer.repeat(self, rows)
        PreallocatedLayer.repeat(self, rows)

    def put_below(self, above: Any) -> None:
        """Put these rows below another layer's."""
        RecurrentLayer.put_below(self, above)
        PreallocatedLayer.put_below(self, above)


def cache_for(config: PreTrainedConfig) -> Cache:
    """Return an empty cache with the layers that a model's own cache has.

    One of attention alone gets them as it calls for them: layers may share keys.
    """
    own = DynamicCache(config=config).layers
    if not any(
        isinstance(each, LinearAttentionCacheLayerMixin | DynamicIndexedLayer) for each in own
    ):
        return Cache(layer_class_to_replicate=PreallocatedLayer)
    return Cache(layers=[_layer(each) for each in own])


def _layer(own: object) -> PreallocatedLayer | RecurrentLayer:
    if not isinstance(own, LinearAttentionCacheLayerMixin):
        return PreallocatedLayer()
    kind = HybridLayer if isinstance(own, DynamicLayer) else RecurrentLayer
    return kind(own.number_of_states)
