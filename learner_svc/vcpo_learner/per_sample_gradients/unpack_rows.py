"""Packed rows hold several trajectories each; this module unpacks them for per-sample gradients.

Packing keeps padding out of the forward and the backward pass. A module's arguments and the
gradient at its output are then copied to one trajectory per row, so the measurement sees the same
batch as without packing. The copy is padded to the longest trajectory, and lives while the module
is measured.

The model must keep trajectories apart: attention only within a segment, positions from 0 in each.
The code cannot detect trajectories that attend to each other. It detects padding that a trajectory
attends to, by its gradient, and refuses it.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vcpo_learner.per_sample_gradients.factors import is_same
from vcpo_learner.per_sample_gradients.module_calls import CallSite, ModuleCall

PADDING = -1
"""The segment of padding tokens."""


@dataclass(slots=True, kw_only=True, eq=False)
class Packing:
    """The places of each trajectory's tokens in packed rows."""

    segments: Tensor
    """[rows, tokens] int64; the number of a trajectory, or PADDING."""
    places: Tensor
    """[num_trajectories, longest] int64 index into all rows' tokens, one row after another. Shorter
    trajectories are filled up with their first token, so every module gets numbers it has seen."""
    is_own: Tensor
    """[num_trajectories, longest] bool; False where a shorter trajectory is filled up."""
    padding: Tensor
    """[tokens] int64 index into all rows' tokens: those that belong to no trajectory."""
    _last: tuple[Tensor, Tensor] | None = None
    _busy_padding: dict[str, Tensor] = field(default_factory=dict)
    """Whether padding has a gradient, by call; on the device."""

    def require_per_token(self, call: CallSite) -> None:
        """Refuse a call whose output or arguments do not have one entry per token.

        Raises: ValueError, naming the module and the argument.
        """
        front = tuple(self.segments.shape)
        shape = call.output_shape
        if shape is not None and shape[:1] == (self.segments.numel(),) and call.is_flat(front[0]):
            return
        with_heads = front[0], 1, front[1]
        if all(each[:3] == with_heads for each in (shape or (), *call.argument_shapes.values())):
            return
        if shape is None or shape[:2] != front:
            raise ValueError(
                f"{call.place} returned shape {shape} for packed rows {front}: "
                "gradient norms need a tensor with one token per entry of the first two axes"
            )
        for key, shape in call.argument_shapes.items():
            if len(shape) > 0 and shape[:2] != front:
                raise ValueError(
                    f"argument {key!r} of {call.place} has shape {tuple(shape)} for packed "
                    f"rows {front}: gradient norms cannot tell which trajectory it belongs to; "
                    "give it one entry per token, or one trajectory to each row"
                )

    def unpack(self, call: ModuleCall, output_gradient: Tensor) -> tuple[ModuleCall, Tensor]:
        """Return a call and the gradient at its output with one trajectory per row.

        output_gradient: [rows, tokens, ...]; returned as [num_trajectories, longest, ...] with
            zeros behind shorter trajectories. Whether padding has a gradient,
            `require_idle_padding` says at the end.
        """
        if len(self.padding):
            at_padding = output_gradient.flatten(0, 1).index_select(0, self.padding)
            self._busy_padding[call.place] = at_padding.any()
        arguments = {key: self._argument(value) for key, value in call.arguments.items()}
        behind = ~self.is_own.view(*self.is_own.shape, *[1] * (output_gradient.ndim - 2))
        gradient = self._unpack_values(output_gradient).masked_fill(behind, 0.0)
        return replace(call, arguments=arguments, output_shape=tuple(gradient.shape)), gradient

    def require_idle_padding(self) -> None:
        """Check that no unpacked call had a gradient at padding; asks a GPU once, for all calls.

        Raises: ValueError, naming the first such module.
        """
        if not self._busy_padding:
            return
        found = torch.stack(list(self._busy_padding.values())).tolist()
        for place, is_busy in zip(self._busy_padding, found, strict=True):
            if is_busy:
                raise ValueError(
                    f"{place} has a gradient at tokens whose segment is {PADDING}: "
                    "a trajectory depends on padding; mask it in the attention"
                )

    def _argument(self, value: Any) -> Any:
        """An argument, unpacked; neighboring layers share an input, and then its unpacked copy."""
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        if self._last is None or not is_same(self._last[0], value):
            # The argument is held too, so that no other tensor can reuse its memory.
            self._last = (value, self._unpack_values(value))
        return self._last[1]

    def _unpack_values(self, values: Tensor) -> Tensor:
        return values.flatten(0, 1)[self.places]


def locate_tokens(segments: Tensor, num_trajectories: int) -> Packing:
    """Return the places of each trajectory's tokens.

    segments: [rows, tokens] int64, from 0 to num_trajectories - 1, or PADDING.
    Raises: ValueError for another shape, type or number, or a trajectory without a token.
    """
    flat = segments.flatten().cpu()  # a GPU would wait for each trajectory
    _require_segments(segments, flat, num_trajectories)
    own = [(flat == number).nonzero()[:, 0] for number in range(num_trajectories)]
    longest = max(len(each) for each in own)
    lengths = torch.tensor([len(each) for each in own])
    return Packing(
        segments=segments,
        places=torch.stack([_fill_up(each, longest) for each in own]).to(segments.device),
        is_own=(torch.arange(longest) < lengths[:, None]).to(segments.device),
        padding=(flat == PADDING).nonzero()[:, 0].to(segments.device),
    )


def _fill_up(places: Tensor, longest: int) -> Tensor:
    return torch.cat([places, places[:1].expand(longest - len(places))])


def _require_segments(segments: Tensor, flat: Tensor, num_trajectories: int) -> None:
    if segments.ndim != 2 or segments.dtype is not torch.int64:
        raise ValueError(
            f"segments is {segments.dtype} of shape {tuple(segments.shape)}: "
            "give int64 of shape [rows, tokens]"
        )
    named: set[int] = set(flat.tolist())
    for number in sorted(named):
        if not PADDING <= number < num_trajectories:
            raise ValueError(
                f"segments holds {number} for {num_trajectories} objectives: give each token the "
                f"number of its trajectory, from 0 on, or {PADDING} for padding"
            )
    missing = set(range(num_trajectories)) - named
    if missing:
        raise ValueError(f"segments has no token of trajectory {min(missing)}: each needs one")
