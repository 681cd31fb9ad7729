"""Calls of modules that own trainable parameters, as per-sample gradients need them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

_CHUNK = 64
"""Tokens of a chunk of the delta rule."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallSite:
    """A call without its tensors, which a recording holds until the gradient arrives."""

    name: str
    """The module's name in its model."""
    module: nn.Module
    arguments: Mapping[int | str, Any]
    """The call's arguments by position or keyword, positions first and in order. The shape of a
    tensor stands in its place."""
    output_shape: tuple[int, ...] | None
    """Shape of the output; None when the output is not a tensor."""
    parameter_names: Sequence[str]
    """Names, within the module, of the parameters in use."""
    is_linear: bool = False
    """Whether the output is that of `torch.nn.functional.linear` on the only argument."""
    is_of_mixer: bool = False
    """Whether the output is a mixer's parameter in each row, or its convolution's at each token."""

    @property
    def place(self) -> str:
        return f"module {self.name!r} ({type(self.module).__name__})"

    @property
    def parameters(self) -> list[nn.Parameter]:
        own: dict[str, Any] = self.module._parameters
        return [own[name] for name in self.parameter_names]

    @property
    def argument_shapes(self) -> dict[int | str, "torch.Size"]:
        return {key: each for key, each in self.arguments.items() if isinstance(each, torch.Size)}

    def is_flat(self, num_rows: int) -> bool:
        """Return whether the output and all arguments have the tokens of all rows on one axis."""
        shape = self.output_shape or ()
        return (
            len(shape) > 1
            and shape[0] % num_rows == 0
            and all(each[:1] == shape[:1] for each in self.argument_shapes.values() if len(each))
        )

    def call(self, tensors: Sequence[Tensor]) -> "ModuleCall":
        """Return the call with its tensor arguments, which are given in their order."""
        given = iter(tensors)
        arguments = {
            key: next(given) if isinstance(value, torch.Size) else value
            for key, value in self.arguments.items()
        }
        return ModuleCall(self, arguments)

    def require_per_trajectory(self, batch_size: int) -> None:
        """Refuse a call whose output does not have one row per trajectory.

        All tokens may be on the first axis instead, where mixtures of experts have them.
        Raises: ValueError, naming the module.
        """
        shape = self.output_shape
        if shape is None or not (shape[:1] == (batch_size,) or self.is_flat(batch_size)):
            raise ValueError(
                f"{self.place} returned shape {self.output_shape} for {batch_size} trajectories: "
                "gradient norms need a tensor with one trajectory per entry of the first axis"
            )


@dataclass(slots=True, eq=False)
class ModuleCall:
    """A call with its tensors in the place of their shapes."""

    site: CallSite
    arguments: Mapping[int | str, Any]

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> "ModuleCall":
        """Return the call with other tensors; numbers stay."""
        arguments = {
            key: change(value) if isinstance(value, Tensor) and value.ndim else value
            for key, value in self.arguments.items()
        }
        return ModuleCall(self.site, arguments)

    def repeat(
        self, parameter_name: str, parameter: Tensor, arguments: Mapping[int | str, Any]
    ) -> Any:
        """Return the module's output with one parameter and all arguments replaced."""
        positional = tuple(value for key, value in arguments.items() if isinstance(key, int))
        keywords = {key: value for key, value in arguments.items() if isinstance(key, str)}
        # As `torch.func.functional_call`, which looks names up and takes as long as the module.
        module = self.site.module
        with replaced({(module, parameter_name): parameter}):
            return module(*positional, **keywords)


@contextmanager
def replaced(others: Mapping[tuple[nn.Module, str], Any]) -> Iterator[None]:
    """Put others in the place of parameters, each by its module and name there, in the block."""
    before = {(module, name): module._parameters[name] for module, name in others}
    try:
        for (module, name), other in others.items():
            module._parameters[name] = other
        yield
    finally:
        for (module, name), parameter in before.items():
            module._parameters[name] = parameter


def in_rows(values: Tensor, num_rows: int) -> Tensor:
    """Return [tokens of all rows, ...] as [rows, tokens, ...]."""
    return values.reshape(num_rows, -1, *values.shape[1:])


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module has the forward of `kind`; a subclass may have its own."""
    return type(module).forward is kind.forward


def is_depthwise(module: nn.Module) -> TypeGuard[nn.Conv1d]:
    """Return whether a module is a causal convolution of each channel by itself."""
    return (
        isinstance(module, nn.Conv1d)
        and module.groups == module.in_channels == module.out_channels
        and module.stride == module.dilation == (1,)
        and module.padding == (module.kernel_size[0] - 1,)
    )


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module owns such a convolution, as the layers of `mixers` do."""
    return any(map(is_depthwise, module.children()))


def past_chunk(model: nn.Module) -> int:
    """Return a number of tokens beyond a chunk of a model's mixers; 0 if it has none.

    A mixer hands its state on from chunk to chunk, and computes within one in another way.
    """
    sizes = [getattr(each, "chunk_size", 0) or _CHUNK for each in model.modules() if is_mixer(each)]
    return max(sizes) + 6 if sizes else 0


def as_stored(value: Any, dtype: torch.dtype) -> Any:
    """Return an argument without its graph, and in the parameters' type if it is floating point."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(dtype) if value.is_floating_point() else value
