"""All trajectories of a micro-batch in one row, so that the model computes no padding.

```
padded   1 1 1 1 1 1      packed   1 1 1 1 1 1 2 2 3 3 3
         2 2 . . . .
         3 3 3 . . .
```

Positions start at 0 in each trajectory, and attention is told where each of them ends
(`forward.attention`). `forward.kept_apart` checks that none sees another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vcpo_learner.device import to_device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRow:
    """The places of the tokens of a padded batch [batch, width] in one row."""

    segments: Tensor
    """[1, tokens] int64; the trajectory of each token, by its row in the padded batch."""
    position_ids: Tensor
    """[1, tokens] int64; from 0 in each trajectory."""
    places: Tensor
    """[batch, width] int64; the token's place in the row; 0 for padding."""
    is_own: Tensor
    """[batch, width] bool; False for padding."""
    ends: Tensor
    """[batch + 1] int32, the end of each trajectory in the row, after a 0."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What a model of transformers is given of the layout, by its names."""
        return {
            "position_ids": self.position_ids,
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), self.ends),
            **dict.fromkeys(("max_length_q", "max_length_k"), self.places.shape[1]),
        }

    def pack(self, padded: Tensor) -> Tensor:
        return padded[self.segments, self.position_ids]

    def unpack(self, values: Tensor) -> Tensor:
        padding = ~self.is_own.view(*self.is_own.shape, *[1] * (values.ndim - 2))
        return values.flatten(0, 1)[self.places].masked_fill(padding, 0.0)


def pack_row(lengths: Sequence[int], device: torch.device) -> PackedRow:
    """Put trajectories into one row, in their order.

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
    return PackedRow(
        segments=segments[None],
        position_ids=(torch.arange(total, device=device) - starts[segments])[None],
        places=(starts[:, None] + columns).masked_fill(~is_own, 0),
        is_own=is_own,
        ends=functional.pad(ends, (1, 0)).int(),
    )
