"""A packed row holds several trajectories; this module unpacks it for per-sample gradients.

Packing keeps padding out of the forward and the backward pass. A module's arguments and the
gradient at its output are then copied to one trajectory per row, so the measurement sees the same
batch as without packing. The copy is padded to the longest trajectory, and lives while the module
is measured.

The model must keep trajectories apart: attention only within a segment, positions from 0 in each.
The code cannot detect trajectories that attend to each other.
"""

from dataclasses import dataclass

from torch import Tensor

from vcpo_learner.per_sample_gradients.factors import is_same
from vcpo_learner.per_sample_gradients.module_calls import CallSite, ModuleCall


@dataclass(slots=True, kw_only=True, eq=False)
class Packing:
    """The places of each trajectory's tokens in a packed row."""

    segments: Tensor
    """[1, tokens] int64; the number of a trajectory."""
    places: Tensor
    """[num_trajectories, longest] int64 index of the row's tokens. Shorter trajectories are filled
    up with a token of the row, so every module gets numbers it has seen."""
    is_own: Tensor
    """[num_trajectories, longest] bool; False where a shorter trajectory is filled up."""
    _last: tuple[Tensor, Tensor] | None = None

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

        output_gradient: [1, tokens, ...]; returned as [num_trajectories, longest, ...] with zeros
            behind shorter trajectories.
        """
        behind = ~self.is_own.view(*self.is_own.shape, *[1] * (output_gradient.ndim - 2))
        gradient = self._unpack_values(output_gradient).masked_fill(behind, 0.0)
        return call.with_tensors(self._argument), gradient

    def _argument(self, value: Tensor) -> Tensor:
        """An argument, unpacked; neighboring layers share an input, and then its unpacked copy."""
        if self._last is None or not is_same(self._last[0], value):
            # The argument is held too, so that no other tensor can reuse its memory.
            self._last = (value, self._unpack_values(value))
        return self._last[1]

    def _unpack_values(self, values: Tensor) -> Tensor:
        return values.flatten(0, 1)[self.places]
