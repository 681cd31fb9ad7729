"""Taps: places at the outputs of modules where a backward pass hands over what it knows.

A tap is the identity on a module's output, or a linear layer itself. In the forward pass autograd
saves the module's inputs for it; in the backward pass it hands them on with the gradient at the
output. So the inputs live as long as what autograd saves itself, and activation checkpointing drops
and computes them again like everything else. (A recording that holds the inputs would keep them,
and checkpointing would save nothing.)

All taps lead to one scalar that needs a gradient, the anchor. A backward pass that asks for the
anchor's gradient goes by every tap that the objective depends on and forms no parameter's gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from operator import ne
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vcpo_learner.per_sample_gradients.experts import ExpertSite
from vcpo_learner.per_sample_gradients.mixers import TappedMixer
from vcpo_learner.per_sample_gradients.mixtures import OtherForward, tapped_forward
from vcpo_learner.per_sample_gradients.module_calls import CallSite, is_plain
from vcpo_learner.per_sample_gradients.slots import Slot, Slots

if TYPE_CHECKING:
    from vcpo_learner.per_sample_gradients.measurement import Measurement

_NAMED = 3
"""Parameters that an error names; it counts the others."""
_CHANGED = "modified by an inplace operation"
"""Part of autograd's message if a saved tensor was written to."""


class Recording:
    """The calls of one forward pass; serves one measuring backward pass.

    Owner: the tensor thread.
    """

    def __init__(self, slots: Slots) -> None:
        device = next((slots.parameter(slot).device for slot in slots), None)
        self.slots = slots
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """A scalar that every use of a slot has as an input, and whose gradient it leaves None."""
        self.sites: list[CallSite] = []
        self.num_uses: Counter[Slot] = Counter()
        """Uses of each slot; those of a layer that runs again are known when it has."""
        self.num_expected: Counter[Slot] = Counter()
        """Uses of each slot that are no call of its module: they measure themselves."""
        self.measuring: Measurement | None = None
        """The object that the uses hand their gradients to in a backward pass; None outside of
        one."""
        self._used: list[nn.Parameter] = []
        self._taps: dict[nn.Module, Callable[..., Any]] = {}
        self.is_preview = False
        """Whether a layer runs that will run again, with taps, in the backward pass."""
        self.is_rerun_whole = True
        """Whether the last run of a layer in a backward pass used all of its slots by taps."""

    def expect(self, slot: Slot) -> None:
        """Count a use of a slot outside of its module's forward, which will measure itself."""
        self.num_uses[slot] += 1
        self.num_expected[slot] += 1
        self._used.append(self.slots.parameter(slot))

    @property
    def parameters(self) -> set[int]:
        return {id(each) for each in self._used}

    def backward(self, objective: Tensor, measuring: Measurement, *, retain_graph: bool) -> None:
        """Hand the gradient of `objective` at every use that it depends on to `measuring`.

        The parameters' `.grad` does not change. Products are not rounded for autocast.
        """
        self.measuring = measuring
        try:
            # A layer that is computed again has the context of its first run.
            with torch.autocast(self.anchor.device.type, enabled=False):
                torch.autograd.grad(
                    objective, [self.anchor], retain_graph=retain_graph, allow_unused=True
                )
        finally:
            self.measuring = None

    def tap(self, output: Any, site: CallSite | ExpertSite, *tensors: Tensor) -> Any:
        """Count a call's uses of its parameters, and return its output with a tap.

        output: without a tap if it is no tensor, or needs no gradient, or will be computed again.
        tensors: the call's tensor arguments, in their order.
        """
        if not (self.count(site) and isinstance(output, Tensor) and output.requires_grad):
            return output
        return applied(Tap, output, tensors, self.anchor, self, site)

    def count(self, site: CallSite | ExpertSite) -> bool:
        """Count a call's uses of its parameters; return whether it gets a tap."""
        if self.is_preview:
            return False
        own = self.slots.of(site.module)
        slots = [own[name] for name in site.parameter_names if name in own]
        for slot in slots:
            self.num_uses[slot] += 1
        self._used.extend(site.parameters)
        if slots and isinstance(site, CallSite):
            if self.measuring is None:
                self.sites.append(site)
            else:
                self.measuring.require(site)
        return bool(slots)

    @contextmanager
    def preview(self, root: nn.Module) -> Iterator[None]:
        """Tap nothing in the block, which runs `root` without a graph; it will run again.

        Until then nobody knows how often it uses its slots: the run to come counts as one use.
        """
        self.num_uses.update(self.slots.within(root))
        self.is_preview = True
        try:
            yield
        finally:
            self.is_preview = False

    @contextmanager
    def rerun(self, root: nn.Module) -> Iterator[None]:
        """Tap the modules within `root`, which runs again, if the backward pass measures."""
        if self.measuring is None:
            yield
            return
        slots, taps = self.slots.within(root), self.tap_modules(root)
        before = [self.num_uses[slot] for slot in slots]
        try:
            yield
        finally:
            for tap in taps:
                tap.remove()
        self.is_rerun_whole = all(map(ne, before, [self.num_uses[slot] for slot in slots]))
        self.num_uses.subtract(slots)

    def tap_modules(self, root: nn.Module | None = None) -> list[OtherForward]:
        return [self._tap_module(name, module) for name, module in self.slots.modules(root)]

    def _tap_module(self, name: str, module: nn.Module) -> OtherForward:
        kept = self.slots.taps.get(module)
        if kept is not None and kept.own is vars(module).get("forward"):
            kept.recording = self
            return OtherForward(module, kept)
        if module not in self._taps:
            forward = tapped_forward(name, module, self) or _TappedForward(name, module, self)
            if module in self.slots.mixers:
                own = self.slots.of(module)
                vectors = list(own) if all(len(each.shape) == 1 for each in own.values()) else []
                forward = TappedMixer(name, module, self, vectors=vectors, forward=forward)
            if isinstance(forward, _TappedForward):
                self.slots.taps[module] = forward
            self._taps[module] = forward
        return OtherForward(module, self._taps[module])


class Tap(torch.autograd.Function):
    """The identity; in a measuring backward pass it hands on the call and the gradient here."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, tensors: Sequence[Tensor], *place: Any) -> Tensor:
        """Return the output; place: the anchor, the recording, the site of a call with tensors."""
        _, ctx.recording, ctx.site = place
        ctx.save_for_backward(*(each.detach() for each in tensors))
        # Not a view: a later module may write into it.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Hand on the gradient, and return it."""
        (gradient,) = gradients
        _hand_on(ctx, _saved(ctx), gradient)
        return gradient, None, None, None, None


class Linear(torch.autograd.Function):
    """A linear layer with its tap in one node, as a host needs as long for a node as for a product.

    In a measuring backward pass it forms no gradient of its parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, *place: Any
    ) -> Tensor:
        """Return the output, of the type that autocast wants; place: as that of a tap."""
        _, ctx.recording, ctx.site = place
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind) and weight.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            inputs, weight = inputs.to(dtype), weight.to(dtype)
        ctx.save_for_backward(inputs, weight)
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient at the inputs; hand on that at the output, or return the others."""
        (gradient,) = gradients
        inputs, weight = _saved(ctx)
        needs_inputs, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_weight = of_bias = None
        if not _hand_on(ctx, (inputs,), gradient):
            rows = gradient.reshape(-1, gradient.shape[-1])
            of_weight = rows.T @ inputs.reshape(len(rows), -1) if needs_weight else None
            of_bias = rows.sum(dim=0) if needs_bias else None
        of_inputs = gradient @ weight if needs_inputs else None
        return of_inputs, of_weight, of_bias, None, None, None


class RmsNorm(torch.autograd.Function):
    """A root mean square norm; with its tap if it is given the place of one.

    In a measuring backward pass it then forms no gradient of its weight.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float, *place: Any) -> Any:
        """Return the output; place: as that of a tap."""
        _, ctx.recording, ctx.site = place or (None, None, None)
        output, scale = run(_normalized, inputs, weight, eps, _output_type(inputs, weight))
        ctx.save_for_backward(inputs, weight, scale)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; hand on that at the output in the place of the weight's."""
        (gradient,) = gradients
        inputs, weight, scale = _saved(ctx)
        needs_inputs, needs_weight, *rest = ctx.needs_input_grad
        of_inputs = of_weight = None
        if not _hand_on(ctx, (inputs,), gradient) and needs_weight:
            of_weight = run(_weight_gradient, gradient, inputs, weight, scale)
        if needs_inputs:
            of_inputs = run(_norm_gradient, gradient, inputs, weight, scale)
        return of_inputs, of_weight, *[None] * len(rest)


class Gate(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Any:
        """Return the product; gate, up: of one type."""
        ctx.save_for_backward(gate, up)
        return run(_gated, gate, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients at both."""
        return run(_gate_gradients, *gradients, *ctx.saved_tensors)


class Rotation(torch.autograd.Function):
    """Queries and keys, each rotated by the angle of its token."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Any, ...]:
        """Return both; cos, sin: like them, or broadcast to them, and without a gradient."""
        ctx.save_for_backward(cos, sin)
        ctx.types = query.dtype, key.dtype
        return tuple(
            run(_rotated, each, cos, sin, _output_type(each, cos)) for each in (query, key)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, which are rotated back."""
        pairs = zip(gradients, ctx.types, strict=True)
        found = [run(_rotated_back, each, *ctx.saved_tensors, dtype) for each, dtype in pairs]
        return *found, None, None


def applied(function: type[torch.autograd.Function], *given: Any) -> Any:
    """Return what a function's `apply` returns, which looks for functorch's transforms first.

    Within one of them it would be wrong.
    """
    without_search: Any = super(torch.autograd.Function, function)
    return without_search.apply(*given)


def _saved(ctx: Any) -> tuple[Tensor, ...]:
    """The saved tensors; raises ValueError, naming the tap's module, if one has changed since."""
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError as error:
        if ctx.site is None or _CHANGED not in str(error):
            raise
        raise ValueError(
            f"{ctx.site.place} had its input changed in place: gradient norms need it as it was;"
            " use the operation that makes a new tensor"
        ) from error


def _hand_on(ctx: Any, tensors: Sequence[Tensor], gradient: Tensor) -> bool:
    """Hand a call's gradient to what measures; return whether anything does."""
    measuring = None if ctx.recording is None else ctx.recording.measuring
    if measuring is not None:
        measuring.receive(ctx.site.call(tensors), gradient)
    return measuring is not None


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of tensors, on a GPU as one kernel."""
    return (_compiled(function) if arguments[0].is_cuda else function)(*arguments)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    config: Any = torch._dynamo.config
    config.recompile_limit = 64  # number types and sizes of one function
    return torch.compile(function)


def _output_type(inputs: Tensor, factor: Tensor) -> torch.dtype:
    dtype, kind = torch.promote_types(inputs.dtype, factor.dtype), inputs.device.type
    is_cast = torch.is_autocast_enabled(kind) and dtype is not torch.float64
    return torch.get_autocast_dtype(kind) if is_cast else dtype


def _precise(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _normalized(
    inputs: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    values = _precise(inputs)
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (weight * (values * scale).to(inputs.dtype)).to(dtype), scale


def _norm_gradient(gradient: Tensor, inputs: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    normalized, weighted = _precise(inputs) * scale, _precise(gradient) * weight
    share = (weighted * normalized).mean(-1, keepdim=True)
    return (torch.addcmul(weighted, normalized, share, value=-1.0) * scale).to(inputs.dtype)


def _weight_gradient(gradient: Tensor, inputs: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return (_precise(inputs) * scale * gradient).flatten(0, -2).sum(dim=0).to(weight.dtype)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _gate_gradients(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    of_gate: Tensor = torch.ops.aten.silu_backward(gradient * up, gate)
    return of_gate, gradient * functional.silu(gate)


def _rotated(values: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    first, second = values.chunk(2, dim=-1)
    return (values * cos + torch.cat([-second, first], dim=-1) * sin).to(dtype)


def _rotated_back(values: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    first, second = (values * sin).chunk(2, dim=-1)
    return (values * cos + torch.cat([second, -first], dim=-1)).to(dtype)


class _TappedForward:
    """A module's forward with a tap at its output."""

    def __init__(self, name: str, module: nn.Module, recording: Recording) -> None:
        self._name = name
        self._module: Any = module
        self.recording = recording
        """Of the pass at hand."""
        self.own = vars(module).get("forward")
        """That of the module itself, if its class has another."""
        self._forward = module.forward
        self._is_linear = is_plain(module, nn.Linear) and "forward" not in vars(module)
        self._tapped = self._linear if self._is_linear else getattr(module.forward, "tapped", None)
        """The forward with its tap in it, of a module that has one."""

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        recording, module = self.recording, self._module
        if recording.is_preview:
            return self._forward(*positional, **keywords)
        if self._tapped is not None:
            (inputs,) = positional or keywords.values()
            site = recording.slots.sites.get(module)
            if site is None or site.arguments[0] != inputs.shape:
                size = getattr(module, "out_features", inputs.shape[-1])
                site = self._site({0: inputs}, (*inputs.shape[:-1], size))
                recording.slots.sites[module] = site
            recording.count(site)
            return self._tapped(inputs, recording.anchor, recording, site)
        output = self._forward(*positional, **keywords)
        arguments = dict[int | str, Any](enumerate(positional)) | keywords
        tensors = [each for each in arguments.values() if isinstance(each, Tensor)]
        shape = tuple(output.shape) if isinstance(output, Tensor) else None
        return recording.tap(output, self._site(arguments, shape), *tensors)

    def _linear(self, inputs: Tensor, *place: Any) -> Any:
        return applied(Linear, inputs, self._module.weight, self._module.bias, *place)

    def _site(self, arguments: Mapping[int | str, Any], shape: tuple[int, ...] | None) -> CallSite:
        """shape: of the output."""
        return CallSite(
            name=self._name,
            module=self._module,
            arguments={
                key: each.shape if isinstance(each, Tensor) else each
                for key, each in arguments.items()
            },
            output_shape=shape,
            parameter_names=list(self.recording.slots.of(self._module)),
            is_linear=self._is_linear,
        )


_ACTIVE: ContextVar[Recording | None] = ContextVar("recording", default=None)


def active_recording() -> Recording | None:
    """Return the recording of the forward pass that runs now; None if none is recorded."""
    return _ACTIVE.get()


@contextmanager
def record_calls(slots: Slots) -> Iterator[Recording]:
    """Record the calls of all modules with trainable parameters in the block."""
    recording: Recording = Recording(slots)
    token = _ACTIVE.set(recording)
    handles = recording.tap_modules()
    try:
        yield recording
    finally:
        for handle in handles:
            handle.remove()
        _ACTIVE.reset(token)


class LostGradientError(RuntimeError):
    """The gradient depends on trainable parameters whose part of it was not computed."""

    def __init__(self, names: Sequence[str], reason: str) -> None:
        rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        shown = ", ".join(repr(name) for name in names[:_NAMED])
        super().__init__(f"the gradient of {shown}{rest} was lost: {reason}")


def require_coverage(objective: Tensor, recording: Recording) -> None:
    """Check that every parameter that an objective depends on was used by a call or use on record.

    A parameter that the objective does not depend on has no gradient, such as that of an expert
    that no token was sent to; it passes.
    objective: of a recorded forward pass, with its graph; saved tensors may be gone.
    Raises: LostGradientError, naming the parameters.
    """
    on_record = recording.parameters
    lost = [each for each in parameter_leaves(objective) if id(each) not in on_record]
    if lost:
        names = {id(recording.slots.parameter(slot)): slot.name for slot in recording.slots}
        unnamed = "a parameter of shape {}"
        raise LostGradientError(
            sorted(names.get(id(each), unnamed.format(tuple(each.shape))) for each in lost),
            "it is used outside of the forward of the module that owns it; freeze it, or call that"
            " module",
        )


def require_gradients(slots: Slots, unused: Collection[Slot]) -> None:
    """Check that every trainable parameter but the unused ones has a `.grad`.

    Raises: LostGradientError, naming the parameters.
    """
    lost = [
        slot.name for slot in slots if slots.parameter(slot).grad is None and slot not in unused
    ]
    if lost:
        raise LostGradientError(lost, "it was computed, and did not get into `.grad`")


def parameter_leaves(objective: Tensor) -> list[nn.Parameter]:
    """Return the parameters in an objective's graph, each once."""
    leaves = (getattr(node, "variable", None) for node in _nodes(objective))
    return [each for each in leaves if isinstance(each, nn.Parameter)]


def _nodes(objective: Tensor) -> Iterator[Any]:
    """Yield the nodes of a graph, each once."""
    seen, waiting = set(), [objective.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions)
