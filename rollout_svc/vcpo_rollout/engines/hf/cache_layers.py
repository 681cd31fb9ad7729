"""Storage of keys and values that grows to the right and shrinks row by row without being copied.

The library's `DynamicLayer` copies everything it holds for each new token. Here a layer keeps room
to the right of its last column, and a row that leaves is overwritten by the last one:

    column    0   1   2   3   4   5   6
    row 0     a   b   c   d   -   -   -      - is room: reserved, not yet part of the states
    row 1     e   f   g   h   -   -   -
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class States:
    """Keys, or values, of one layer: [rows, heads, columns, head]."""

    def __init__(self, states: Tensor) -> None:
        self._room = states
        self._first = 0
        self._end = states.shape[2]

    @property
    def tensor(self) -> Tensor:
        """The states as a view, valid until the next change."""
        return self._room[:, :, self._first : self._end]

    def append(self, columns: Tensor) -> None:
        """Put columns on the right; makes room for a quarter more when there is none left."""
        num_new = columns.shape[2]
        if self._end + num_new > self._room.shape[2]:
            held = self.tensor
            num_columns = held.shape[2] + num_new
            self._reserve(held, num_rows=held.shape[0], num_columns=num_columns)
            self._room[:, :, : held.shape[2]] = held
            self._end = held.shape[2]
        self._room[:, :, self._end : self._end + num_new] = columns
        self._end += num_new

    def keep(self, rows: Sequence[int], *, num_unused_columns: int) -> None:
        """Put row `rows[i]` in place i, drop the others, and columns on the left.

        rows: each either its own place or beyond `len(rows)`, so that a move overwrites no other.
        """
        places = [place for place, row in enumerate(rows) if row != place]
        if places:
            self._room[places] = self._room[[rows[place] for place in places]]
        self._room = self._room[: len(rows)]
        self._first += num_unused_columns

    def put_below(self, above: Tensor) -> None:
        """Put these rows under others; both end in the same column, what is missing left is 0.

        It must be a number, since attention multiplies even what it masks.
        """
        below, num_above = self.tensor, above.shape[0]
        num_columns = max(above.shape[2], below.shape[2])
        self._reserve(below, num_rows=num_above + below.shape[0], num_columns=num_columns)
        self._room[:num_above, :, num_columns - above.shape[2] : num_columns] = above
        self._room[num_above:, :, num_columns - below.shape[2] : num_columns] = below
        self._end = num_columns

    def _reserve(self, like: Tensor, *, num_rows: int, num_columns: int) -> None:
        _, heads, _, head_size = like.shape
        capacity = num_columns + num_columns // 4 + 16
        self._room = like.new_zeros((num_rows, heads, capacity, head_size))
        self._first = 0


class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its base is not annotated
    """A layer of a `transformers` cache that stores its states with room.

    `keys` and `values` are views of what is stored; the library reads their shape.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # its base is not annotated
        self._stored: tuple[States, States] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns and return all; the interface that the model's attention calls."""
        if self._stored is None:
            self._stored = States(key_states), States(value_states)
            self.is_initialized = True
        else:
            for states, columns in zip(self._stored, (key_states, value_states), strict=True):
                states.append(columns)
        return self._show()

    def keep(self, rows: Sequence[int], *, num_unused_columns: int) -> None:
        """Drop rows and columns: `States.keep`."""
        if self._stored is not None:
            for states in self._stored:
                states.keep(rows, num_unused_columns=num_unused_columns)
            self._show()

    def put_below(self, above: PreallocatedLayer) -> None:
        """Take another layer's rows in above these: `States.put_below`."""
        if self._stored is not None and above._stored is not None:
            for states, other in zip(self._stored, above._stored, strict=True):
                states.put_below(other.tensor)
            self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        assert self._stored is not None
        keys, values = (states.tensor for states in self._stored)
        self.keys, self.values = keys, values
        return keys, values
