"""Keys and values in preallocated storage: appending a token or removing a row does not copy all.

The library's `DynamicLayer` copies its whole content for each new token. These layers reserve
columns to the right, and overwrite a removed row with the last one:

    column    0   1   2   3   4   5   6
    row 0     a   b   c   d   -   -   -      - is reserved and not yet part of the states
    row 1     e   f   g   h   -   -   -
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import DynamicLayer


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
        self._stored: tuple[States, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns and return all states; the model's attention calls this method."""
        if not self._stored:
            self._stored = States(key_states), States(value_states)
            self.is_initialized = True
        else:
            for states, columns in zip(self._stored, (key_states, value_states), strict=True):
                states.append(columns)
        return self._refresh_views()

    def keep(self, rows: Sequence[int], *, num_unused_columns: int) -> None:
        """Drop rows and columns, as `States.keep` describes."""
        for states in self._stored:
            states.keep(rows, num_unused_columns=num_unused_columns)
        self._refresh_views()

    def repeat(self, rows: Sequence[int]) -> None:
        """Make copies of these rows the only ones."""
        for states in self._stored:
            states.repeat(rows)
        self._refresh_views()

    def put_below(self, above: PreallocatedLayer) -> None:
        """Put these rows below another layer's, as `States.put_below` describes."""
        for states, other in zip(self._stored, above._stored, strict=True):
            states.put_below(other.tensor)
        self._refresh_views()

    def _refresh_views(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (states.tensor for states in self._stored)
        return self.keys, self.values
