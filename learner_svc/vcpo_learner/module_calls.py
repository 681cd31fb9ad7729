"""A record of how a model's modules were applied in one forward pass.

Calls hold the tensors themselves, graph included: they live as long as the record does.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleCall:
    """One application of a module that owns trainable parameters."""

    name: str
    """The module's name in its model."""
    module: nn.Module
    arguments: Mapping[int | str, Any]
    """By position or keyword, positions first and in order."""
    output: Any
    versions: tuple[int, ...]
    """How often output and arguments had been written to in place."""

    @property
    def place(self) -> str:
        """The module, for an error's message."""
        return f"module {self.name!r} ({type(self.module).__name__})"

    def require_per_trajectory(self, batch_size: int) -> None:
        """Refuse a call that is not as it was, or whose output is not one row per trajectory.

        Raises: ValueError, naming the module.
        """
        is_tensor = isinstance(self.output, Tensor)
        if not (is_tensor and self.output.shape[:1] == (batch_size,)):
            found = f"shape {tuple(self.output.shape)}" if is_tensor else f"{type(self.output)}"
            raise ValueError(
                f"{self.place} returned {found} for {batch_size} trajectories: gradient norms "
                "need a tensor with one trajectory per entry of the first axis"
            )
        if _versions(self.output, self.arguments) != self.versions:
            raise ValueError(
                f"{self.place} had its input or output changed in place: gradient norms need both "
                "as they were; use the operation that makes a new tensor"
            )

    def repeated(
        self, parameter_name: str, parameter: Tensor, arguments: Mapping[int | str, Any]
    ) -> Any:
        """What the module returns with one parameter and all arguments replaced."""
        positional = tuple(value for key, value in arguments.items() if isinstance(key, int))
        keywords = {key: value for key, value in arguments.items() if isinstance(key, str)}
        replaced = {parameter_name: parameter}
        return torch.func.functional_call(self.module, replaced, positional, keywords)


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[list[ModuleCall]]:
    """Record the calls of all modules with trainable parameters while the block runs."""
    calls: list[ModuleCall] = []
    handles = [
        module.register_forward_hook(_recorder(name, calls), with_kwargs=True)
        for name, module in model.named_modules()
        if own_trainable_parameters(module)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def own_trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that the module holds itself, not in a submodule, and that need a gradient."""
    own = module.named_parameters(recurse=False)
    return {name: parameter for name, parameter in own if parameter.requires_grad}


def _recorder(name: str, calls: list[ModuleCall]) -> Callable[..., None]:
    def record(
        module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        arguments: dict[int | str, Any] = dict(enumerate(positional))
        arguments.update(keywords)
        versions = _versions(output, arguments)
        call = ModuleCall(
            name=name, module=module, arguments=arguments, output=output, versions=versions
        )
        calls.append(call)

    return record


def _versions(output: Any, arguments: Mapping[int | str, Any]) -> tuple[int, ...]:
    values = (output, *arguments.values())
    return tuple(value._version for value in values if isinstance(value, Tensor))
