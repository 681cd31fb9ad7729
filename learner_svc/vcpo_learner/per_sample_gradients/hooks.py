"""A record of how a model's modules were applied in one forward pass, and of what came back.

Outputs are not held: a hook on each hands its gradient to whoever listens during the backward pass,
and the tensor itself can go as soon as the model is done with it. Such a hook keeps speaking of the
output as the module returned it, even when a later module writes into it.
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
    """The output's place in the graph, when no argument needs a gradient: a backward pass may end
    there. None otherwise, and for an output that needs no gradient."""
    versions: tuple[int, ...]
    """How often arguments had been written to in place."""

    @property
    def place(self) -> str:
        """The module, for an error's message."""
        return f"module {self.name!r} ({type(self.module).__name__})"

    def require_per_trajectory(self, batch_size: int) -> None:
        """Refuse a call whose output is not one row per trajectory.

        Raises: ValueError, naming the module.
        """
        if self.output_shape is None or self.output_shape[:1] != (batch_size,):
            raise ValueError(
                f"{self.place} returned shape {self.output_shape} for {batch_size} trajectories: "
                "gradient norms need a tensor with one trajectory per entry of the first axis"
            )

    def require_unchanged(self) -> None:
        """Refuse a call whose arguments are not what they were.

        Raises: ValueError, naming the module.
        """
        if _versions(self.arguments) != self.versions:
            raise ValueError(
                f"{self.place} had its input changed in place: gradient norms need it as it was; "
                "use the operation that makes a new tensor"
            )

    def repeated(
        self, parameter_name: str, parameter: Tensor, arguments: Mapping[int | str, Any]
    ) -> Any:
        """What the module returns with one parameter and all arguments replaced."""
        positional = tuple(value for key, value in arguments.items() if isinstance(key, int))
        keywords = {key: value for key, value in arguments.items() if isinstance(key, str)}
        replaced = {parameter_name: parameter}
        return torch.func.functional_call(self.module, replaced, positional, keywords)


Listener = Callable[[ModuleCall, Tensor], None]
"""Told the gradient at a call's output, in the output's shape."""


@dataclass(slots=True, kw_only=True, eq=False)
class Recording:
    """The calls of one forward pass, in order."""

    calls: list[ModuleCall] = field(default_factory=list)
    listener: Listener | None = None
    """Who is told of gradients; None lets backward passes go by unheard."""

    def backward(self, objective: Tensor, listener: Listener, *, retain_graph: bool) -> None:
        """Tell `listener` the gradient of `objective` at every call that it depends on.

        The pass goes no further than to the calls' outputs: the parameters' `.grad` is not touched.
        Each call is let go as soon as it was told of, so that arguments live no longer than a plain
        backward pass would keep them; a recording serves one such pass.
        """
        roots = [call.root for call in self.calls if call.root is not None]
        self.calls.clear()
        self.listener = listener
        try:
            torch.autograd.grad(objective, roots, retain_graph=retain_graph, allow_unused=True)
        finally:
            self.listener = None

    def _hear(self, held: list[ModuleCall], gradient: Tensor) -> None:
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
                tensor.register_hook(lambda gradient: self._hear(held, gradient))  # type: ignore[no-untyped-call]

        return record


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[Recording]:
    """Record the calls of all modules with trainable parameters while the block runs."""
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
    """Parameters that the module holds itself, not in a submodule, and that need a gradient."""
    own = module.named_parameters(recurse=False)
    return {name: parameter for name, parameter in own if parameter.requires_grad}


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes what `kind` does; a subclass with a forward of its own may not."""
    return type(module).forward is kind.forward


def as_stored(value: Any, dtype: torch.dtype) -> Any:
    """An argument without its graph, and, if autocast made it smaller, in the parameters' type."""
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
