"""Several trajectories per row, so that the model computes little padding.

```
padded   1 1 1 1 1 1      packed   1 1 1 1 1 1
         2 2 . . . .               2 2 3 3 3 .
         3 3 3 . . .
```

Positions start at 0 in each trajectory. With such positions and no attention mask, the models of
transformers keep trajectories of one row from attending to each other: by a mask of tokens times
tokens, or without one if attention is told where each trajectory ends (`forward.attention`). Then
all of them stand in one row, and there is no padding. `forward.kept_apart` checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vcpo_learner.device import to_device
from vcpo_learner.per_sample_gradients.unpack_rows import PADDING


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """The places of the tokens of a padded batch [batch, width] in fewer rows."""

    segments: Tensor
    """[rows, tokens] int64; the trajectory of each token, by its row in the padded batch, or
    PADDING."""
    position_ids: Tensor
    """[rows, tokens] int64; from 0 in each trajectory, and in the rest of a row."""
    places: Tensor
    """[batch, width] int64; the token's place among all rows' tokens, one row after another; 0 for
    padding."""
    is_own: Tensor
    """[batch, width] bool; False for padding."""
    ends: Tensor | None = None
    """[batch + 1] int32, the end of each trajectory in the only row, after a 0; None for rows whose
    attention is masked."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What a model of transformers is given of the layout, by its names."""
        arguments: dict[str, Any] = {"position_ids": self.position_ids}
        if self.ends is not None:
            arguments |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), self.ends)
            arguments |= dict.fromkeys(("max_length_q", "max_length_k"), self.places.shape[1])
        return arguments

    def pack(self, padded: Tensor, fill: int) -> Tensor:
        """Return [batch, width, ...] numbers as [rows, tokens, ...], with `fill` as padding."""
        rows, columns = self.segments.clamp_min(0), self.position_ids
        padding = (self.segments == PADDING).view(*self.segments.shape, *[1] * (padded.ndim - 2))
        return padded[rows, columns].masked_fill(padding, fill)

    def unpack(self, values: Tensor) -> Tensor:
        """Return [rows, tokens, ...] as [batch, width, ...], with zeros as padding."""
        padding = ~self.is_own.view(*self.is_own.shape, *[1] * (values.ndim - 2))
        return values.flatten(0, 1)[self.places].masked_fill(padding, 0.0)


def pack_rows(lengths: Sequence[int], device: torch.device) -> PackedRows | None:
    """Fit trajectories into rows as long as the longest of them; None if that saves no row.

    Longer rows would hold less padding, but a masked attention also computes what its mask hides.
    lengths: [batch] tokens, at least 1 each.
    """
    rows = _fit(lengths, max(lengths))
    return None if len(rows) == len(lengths) else lay_out(lengths, rows, max(lengths), device)


def pack_one_row(lengths: Sequence[int], device: torch.device) -> PackedRows:
    """Put trajectories into one row, in their order, for an attention that is told their ends.

    lengths: [batch] tokens, at least 1 each.
    """
    sizes, total = to_device(torch.tensor(lengths), device), sum(lengths)
    ends = sizes.cumsum(0)
    starts = ends - sizes
    numbers = torch.arange(len(lengths), device=device)
    columns = torch.arange(max(lengths), device=device)
    is_own = columns < sizes[:, None]
    # The size of the result is given, so that nothing waits for the device.
    segments = torch.repeat_interleave(numbers, sizes, output_size=total)
    return PackedRows(
        segments=segments[None],
        position_ids=(torch.arange(total, device=device) - starts[segments])[None],
        places=(starts[:, None] + columns).masked_fill(~is_own, 0),
        is_own=is_own,
        ends=functional.pad(ends, (1, 0)).int(),
    )


def lay_out(
    lengths: Sequence[int], rows: Sequence[Sequence[int]], width: int, device: torch.device
) -> PackedRows:
    """Return the layout of trajectories in rows of `width` tokens.

    rows: the numbers of the trajectories of each row, in their order.
    """
    longest = max(lengths)
    segments = torch.full((len(rows), width), PADDING)
    positions = torch.zeros(len(rows), width, dtype=torch.int64)
    places = torch.zeros(len(lengths), longest, dtype=torch.int64)
    for row, members in enumerate(rows):
        end = 0
        for trajectory in members:
            start, end = end, end + lengths[trajectory]
            segments[row, start:end] = trajectory
            positions[row, start:end] = torch.arange(end - start)
            places[trajectory, : end - start] = row * width + torch.arange(start, end)
        positions[row, end:] = torch.arange(width - end)
    return PackedRows(
        segments=to_device(segments, device),
        position_ids=to_device(positions, device),
        places=to_device(places, device),
        is_own=to_device(torch.arange(longest) < torch.tensor(lengths)[:, None], device),
    )


def _fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Longest first, each into the first row with room: at most 11/9 of the fewest rows, plus 1.

    Source: first fit decreasing, Johnson 1973.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for trajectory in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        length = lengths[trajectory]
        row = next((at for at, left in enumerate(room) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(trajectory)
        room[row] -= length
    return rows
