"""A recording of the modules' calls in one forward pass, and of the gradients at their outputs.

Outputs are not held: a hook on each output passes its gradient to a listener during the backward
pass, and the tensor is freed when the model no longer needs it. The hook belongs to the output as
the module returned it, even if a later module writes into it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleCall:
    """One application of a module that owns trainable parameters."""

    name: str
    """The module's name in its model."""
    module: nn.Module
    arguments: Mapping[int | str, Any]
    """By position or keyword, positions first and in order."""
    output_shape: tuple[int, ...] | None
    """None when the output is not a tensor."""
    root: GradientEdge | None
    """The output's place in the graph if no argument needs a gradient: a backward pass may end
    there. None otherwise, or if the output needs no gradient."""
    versions: tuple[int, ...]
    """How often each tensor argument had been written to in place."""

    @property
    def place(self) -> str:
        """The module's name and type, for error messages."""
        return f"module {self.name!r} ({type(self.module).__name__})"

    def require_per_trajectory(self, batch_size: int) -> None:
        """Refuse a call whose output does not have one row per trajectory.

        Raises: ValueError, naming the module.
        """
        if self.output_shape is None or self.output_shape[:1] != (batch_size,):
            raise ValueError(
                f"{self.place} returned shape {self.output_shape} for {batch_size} trajectories: "
                "gradient norms need a tensor with one trajectory per entry of the first axis"
            )

    def require_unchanged(self) -> None:
        """Refuse a call whose arguments were changed in place.

        Raises: ValueError, naming the module.
        """
        if _versions(self.arguments) != self.versions:
            raise ValueError(
                f"{self.place} had its input changed in place: gradient norms need it as it was; "
                "use the operation that makes a new tensor"
            )

    def repeat(
        self, parameter_name: str, parameter: Tensor, arguments: Mapping[int | str, Any]
    ) -> Any:
        """Return the module's output with one parameter and all arguments replaced."""
        positional = tuple(value for key, value in arguments.items() if isinstance(key, int))
        keywords = {key: value for key, value in arguments.items() if isinstance(key, str)}
        replaced = {parameter_name: parameter}
        return torch.func.functional_call(self.module, replaced, positional, keywords)


Listener = Callable[[ModuleCall, Tensor], None]
"""Receives a call and the gradient at its output, in the output's shape."""


@dataclass(slots=True, kw_only=True, eq=False)
class Recording:
    """The calls of one forward pass, in order."""

    calls: list[ModuleCall] = field(default_factory=list)
    listener: Listener | None = None
    """Receives gradients; None ignores them."""

    def backward(self, objective: Tensor, listener: Listener, *, retain_graph: bool) -> None:
        """Pass the gradient of `objective` at every call that it depends on to `listener`.

        The pass ends at the calls' outputs: the parameters' `.grad` does not change. Each call is
        released after its gradient was passed on, so arguments live no longer than in a plain
        backward pass. A recording serves one such pass.
        """
        roots = [call.root for call in self.calls if call.root is not None]
        self.calls.clear()
        self.listener = listener
        try:
            torch.autograd.grad(objective, roots, retain_graph=retain_graph, allow_unused=True)
        finally:
            self.listener = None

    def _pass_on(self, held: list[ModuleCall], gradient: Tensor) -> None:
        if self.listener is not None and held:
            self.listener(held.pop(), gradient)

    def _recorder(self, name: str) -> Callable[..., None]:
        def record(
            module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any], output: Any
        ) -> None:
            arguments: dict[int | str, Any] = dict(enumerate(positional))
            arguments.update(keywords)
            tensor = output if isinstance(output, Tensor) else None
            call = ModuleCall(
                name=name,
                module=module,
                arguments=arguments,
                output_shape=None if tensor is None else tuple(tensor.shape),
                root=_root(tensor, arguments),
                versions=_versions(arguments),
            )
            self.calls.append(call)
            if tensor is not None and tensor.requires_grad:
                held = [call]
                tensor.register_hook(lambda gradient: self._pass_on(held, gradient))  # type: ignore[no-untyped-call]

        return record


@contextmanager
def record_calls(model: nn.Module) -> Iterator[Recording]:
    """Record the calls of all modules with trainable parameters in the block."""
    recording = Recording()
    handles = [
        module.register_forward_hook(recording._recorder(name), with_kwargs=True)
        for name, module in model.named_modules()
        if own_trainable_parameters(module)
    ]
    try:
        yield recording
    finally:
        for handle in handles:
            handle.remove()


def own_trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the module's own parameters, without its submodules', that need a gradient."""
    own = module.named_parameters(recurse=False)
    return {name: parameter for name, parameter in own if parameter.requires_grad}


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module has the forward of `kind`; a subclass may have its own."""
    return type(module).forward is kind.forward


def as_stored(value: Any, dtype: torch.dtype) -> Any:
    """Return an argument without its graph, and in the parameters' type if it is floating point."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(dtype) if value.is_floating_point() else value


def _root(output: Tensor | None, arguments: Mapping[int | str, Any]) -> GradientEdge | None:
    if output is None or not output.requires_grad:
        return None
    if any(isinstance(each, Tensor) and each.requires_grad for each in arguments.values()):
        return None
    return get_gradient_edge(output)


def _versions(arguments: Mapping[int | str, Any]) -> tuple[int, ...]:
    return tuple(each._version for each in arguments.values() if isinstance(each, Tensor))
