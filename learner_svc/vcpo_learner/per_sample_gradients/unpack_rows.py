"""Packed rows: several trajectories in one, and how they are taken apart again.

Packing keeps padding out of the forward and the backward pass. What a module with parameters has
per token, its arguments and the gradient at its output, is then laid out anew, one trajectory to a
row, so that whatever measures gradients sees the batch that it would have seen without packing.
That copy is padded to the longest trajectory, and lives as long as the module is being measured.

The model must keep trajectories apart: attention within a segment only, positions from 0 in each.
Two that see each other cannot be noticed. Padding that is seen has a gradient, and is refused.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vcpo_learner.per_sample_gradients.hooks import ModuleCall

PADDING = -1
"""The segment of tokens that belong to no trajectory."""


@dataclass(slots=True, kw_only=True, eq=False)
class Packing:
    """Where the tokens of each trajectory stand."""

    segments: Tensor
    """[rows, tokens] int64; the number of a trajectory, or PADDING."""
    places: Tensor
    """[num_trajectories, longest] int64 into all rows' tokens, one row after another; behind a
    shorter trajectory its first token again, so that no module meets numbers it never saw."""
    is_own: Tensor
    """[num_trajectories, longest] bool; False behind a shorter trajectory."""
    _last: tuple[Tensor, Tensor] | None = None

    def require_per_token(self, call: ModuleCall) -> None:
        """Refuse a call whose output or arguments are not made of one entry per token.

        Raises: ValueError, naming the module and the argument.
        """
        front = tuple(self.segments.shape)
        if call.output_shape is None or call.output_shape[:2] != front:
            raise ValueError(
                f"{call.place} returned shape {call.output_shape} for packed rows {front}: "
                "gradient norms need a tensor with one token per entry of the first two axes"
            )
        for key, value in call.arguments.items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape[:2] != front:
                raise ValueError(
                    f"argument {key!r} of {call.place} has shape {tuple(value.shape)} for packed "
                    f"rows {front}: gradient norms cannot tell which trajectory it belongs to; "
                    "give it one entry per token, or one trajectory to each row"
                )

    def unpacked(self, call: ModuleCall, output_gradient: Tensor) -> tuple[ModuleCall, Tensor]:
        """A call and the gradient at its output as if every trajectory had a row for itself.

        output_gradient: [rows, tokens, ...]; it comes back [num_trajectories, longest, ...] with
            zeros behind shorter trajectories.
        Raises: ValueError, naming the module, when padding has a gradient.
        """
        self._require_idle_padding(call, output_gradient)
        arguments = {key: self._argument(value) for key, value in call.arguments.items()}
        behind = ~self.is_own.view(*self.is_own.shape, *[1] * (output_gradient.ndim - 2))
        gradient = self._gathered(output_gradient).masked_fill(behind, 0.0)
        return replace(call, arguments=arguments, output_shape=tuple(gradient.shape)), gradient

    def _require_idle_padding(self, call: ModuleCall, output_gradient: Tensor) -> None:
        if bool(output_gradient[self.segments == PADDING].any()):
            raise ValueError(
                f"{call.place} has a gradient at tokens whose segment is {PADDING}: "
                "a trajectory depends on padding; mask it in the attention"
            )

    def _argument(self, value: Any) -> Any:
        """Layers side by side share an input, and then share what was made of it."""
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        if self._last is None or self._last[0] is not value:
            self._last = (value, self._gathered(value.detach()))
        return self._last[1]

    def _gathered(self, values: Tensor) -> Tensor:
        return values.flatten(0, 1)[self.places]


def packing(segments: Tensor, num_trajectories: int) -> Packing:
    """Find each trajectory's tokens.

    segments: [rows, tokens] int64, from 0 to num_trajectories - 1, or PADDING.
    Raises: ValueError at another shape, type or number, and at a trajectory without a token.
    """
    _require_segments(segments, num_trajectories)
    flat = segments.flatten()
    own = [(flat == number).nonzero()[:, 0] for number in range(num_trajectories)]
    longest = max(len(each) for each in own)
    lengths = torch.tensor([len(each) for each in own], device=flat.device)
    return Packing(
        segments=segments,
        places=torch.stack([_filled_up(each, longest) for each in own]),
        is_own=torch.arange(longest, device=flat.device) < lengths[:, None],
    )


def _filled_up(places: Tensor, longest: int) -> Tensor:
    return torch.cat([places, places[:1].expand(longest - len(places))])


def _require_segments(segments: Tensor, num_trajectories: int) -> None:
    if segments.ndim != 2 or segments.dtype is not torch.int64:
        raise ValueError(
            f"segments is {segments.dtype} of shape {tuple(segments.shape)}: "
            "give int64 of shape [rows, tokens]"
        )
    named: set[int] = set(segments.flatten().tolist())
    for number in sorted(named):
        if not PADDING <= number < num_trajectories:
            raise ValueError(
                f"segments holds {number} for {num_trajectories} objectives: give each token the "
                f"number of its trajectory, from 0 on, or {PADDING} for padding"
            )
    missing = set(range(num_trajectories)) - named
    if missing:
        raise ValueError(f"segments has no token of trajectory {min(missing)}: each needs one")
