"""All trajectories of a micro-batch in one row, so that the model computes no padding.

```
padded   1 1 1 1 1 1      packed   1 1 1 1 1 1 2 2 3 3 3
         2 2 . . . .
         3 3 3 . . .
```

Positions start at 0 in each trajectory, and attention is told where each of them ends
(`forward.attention`). A mixer is given the padded batch: kernels differ in what they are told, and
PyTorch's are told nothing. `forward.kept_apart` checks that no trajectory sees another one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vcpo_learner.device import to_device
from vcpo_learner.per_sample_gradients.measurement import Packing
from vcpo_learner.per_sample_gradients.mixtures import OtherForward
from vcpo_learner.per_sample_gradients.module_calls import is_mixer


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
    def packing(self) -> Packing:
        return Packing(segments=self.segments, places=self.places, is_own=self.is_own)

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


@contextmanager
def unpacked_mixers(model: nn.Module, row: PackedRow | None) -> Iterator[None]:
    """Give the model's mixers the padded batch in the block, and their outputs back in the row.

    row: that the model is given; None if it is given the padded batch.
    """
    replaced = []
    if row is not None:
        mixers = [each for each in model.modules() if is_mixer(each)]
        replaced = [OtherForward(each, _UnpackedForward(each.forward, row)) for each in mixers]
    token = _ACTIVE.set(row)
    try:
        yield
    finally:
        _ACTIVE.reset(token)
        for each in replaced:
            each.remove()


def active_row() -> PackedRow | None:
    """Return the row of the forward pass that runs now; None for the padded batch."""
    return _ACTIVE.get()


class _UnpackedForward:
    """A mixer's forward on one trajectory to a row."""

    def __init__(self, forward: Callable[..., Any], row: PackedRow) -> None:
        self._forward = forward
        self._row = row

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        states, *others = positional or [keywords["hidden_states"]]
        of_row = {*self._row.arguments, "hidden_states"}
        named = {key: each for key, each in keywords.items() if key not in of_row}
        return self._row.pack(self._forward(self._row.unpack(states), *others, **named))


_ACTIVE: ContextVar[PackedRow | None] = ContextVar("packed row", default=None)
