"""Taps: places at the outputs of modules where a backward pass hands over what it knows.

A tap is the identity on a module's output, or a linear layer itself. In the forward pass autograd
saves the module's inputs for it; in the backward pass it hands them on with the gradient at the
output. So the inputs live as long as what autograd saves itself, and activation checkpointing drops
and computes them again like everything else. (A recording that holds the inputs would keep them,
and checkpointing would save nothing.)

All taps lead to one scalar that needs a gradient, the anchor. A backward pass that asks for the
anchor's gradient goes by every tap that the objective depends on and forms no parameter's gradient.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import ne
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from vcpo_learner.per_sample_gradients.experts import ExpertCall, ExpertSite
from vcpo_learner.per_sample_gradients.factors import is_same
from vcpo_learner.per_sample_gradients.mixers import TappedMixer
from vcpo_learner.per_sample_gradients.mixtures import OtherForward, tapped_forward
from vcpo_learner.per_sample_gradients.module_calls import CallSite, ModuleCall, is_plain
from vcpo_learner.per_sample_gradients.slots import Slot, Slots
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum

_CHANGED = "modified by an inplace operation"
"""Part of autograd's message if a saved tensor was written to."""
_CHECKPOINTED = "torch.utils.checkpoint"
"""Part of its message if a layer that PyTorch runs again differs the second time, or may not run
again for an anchor's gradient."""


class CrossTerm(Protocol):
    """A slot's per-sample gradients from one use, for their products with those of an embedding."""

    def inner_products(self, token_ids: Tensor, gradients: Tensor) -> Tensor:
        """Return <G_i, sum_t onehot(token_it) gradient_it^T>, [batch] float64.

        token_ids: [batch, tokens] int64; gradients: [batch, tokens, num_columns]. With packed rows
            they are unpacked: one trajectory to each row, and gradients of 0 behind shorter ones.
        """


class Measuring(Protocol):
    """What the uses of slots hand their gradients to during a measuring backward pass."""

    @property
    def num_trajectories(self) -> int:
        """Trajectories of the forward pass."""

    @property
    def weighted_sum(self) -> WeightedSum | None:
        """The sum to form; None if only norms are wanted."""

    def require(self, site: CallSite) -> None:
        """Refuse a call that cannot be measured.

        Raises: ValueError, naming the module.
        """

    def receive(self, call: ModuleCall | ExpertCall, output_gradient: Tensor) -> None:
        """Take a call and the gradient at its output, in the output's shape."""

    def receive_measured(
        self, slot: Slot, squared_norms: Tensor, cross_term: CrossTerm | None = None
    ) -> None:
        """Take the norms of a use that was announced by `expect` and measured itself.

        squared_norms: [num_trajectories] float64. The use has added its gradients to `weighted_sum`
            by then.
        cross_term: for the products with the slot's other uses; None if it has no other.
        """


class Recording:
    """The calls of one forward pass; serves one measuring backward pass.

    Owner: the tensor thread.
    """

    def __init__(self, slots: Slots) -> None:
        device = next((slots.parameter(slot).device for slot in slots), None)
        self.slots = slots
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        """A scalar that every use of a slot has as an input, and whose gradient it leaves None."""
        self.device_type = self.anchor.device.type
        self.sites: list[CallSite] = []
        self.num_uses: Counter[Slot] = Counter()
        """Uses of each slot; those of a layer that runs again are known when it has."""
        self.num_expected: Counter[Slot] = Counter()
        """Uses of each slot that are no call of its module: they measure themselves."""
        self.measuring: Measuring | None = None
        """The object that the uses hand their gradients to in a backward pass; None outside of
        one."""
        self._used: list[nn.Parameter] = []
        self._taps: dict[nn.Module, Callable[..., Any]] = {}
        self.is_preview = False
        """Whether a layer runs that will run again, with taps, in the backward pass."""
        self.is_rerun_whole = True
        """Whether the last run of a layer in a backward pass used all of its slots by taps."""
        self._cast = self.anchor, -1, self.anchor
        """The input of the last linear layer, its version, and its copy for autocast."""

    def expect(self, slot: Slot) -> None:
        """Count a use of a slot outside of its module's forward, which will measure itself."""
        self.num_uses[slot] += 1
        self.num_expected[slot] += 1
        self._used.append(self.slots.parameter(slot))

    @property
    def parameters(self) -> set[int]:
        return {id(each) for each in self._used}

    def backward(self, objective: Tensor, measuring: Measuring, *, retain_graph: bool) -> None:
        """Hand the gradient of `objective` at every use that it depends on to `measuring`.

        The parameters' `.grad` does not change. Products are not rounded for autocast.

        Raises: ValueError if PyTorch's own checkpoints run layers again, which taps do not see.
        """
        self.measuring = measuring
        try:
            # A layer that is computed again has the context of its first run.
            with torch.autocast(self.device_type, enabled=False):
                torch.autograd.grad(
                    objective, [self.anchor], retain_graph=retain_graph, allow_unused=True
                )
        except RuntimeError as error:
            if _CHECKPOINTED not in str(error):
                raise
            raise ValueError(
                "layers run again by torch.utils.checkpoint, where gradient norms cannot see them:"
                " in place of model.gradient_checkpointing_enable() call set_checkpoints(model,"
                " ActivationCheckpointing.LAYERS) of vcpo_learner.forward.activation_checkpointing"
            ) from error
        finally:
            self.measuring = None

    def tap(self, output: Any, site: CallSite | ExpertSite, *tensors: Tensor) -> Any:
        """Count a call's uses of its parameters, and return its output with a tap.

        output: without a tap if it is no tensor, or needs no gradient, or will be computed again.
        tensors: the call's tensor arguments, in their order.
        """
        if not (self.count(site) and isinstance(output, Tensor) and output.requires_grad):
            return output
        return Tap.apply(output, tensors, self.anchor, self, site)  # type: ignore[no-untyped-call]

    def cast(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a linear layer's input in a type; neighbors that share it share the copy."""
        values, version, copy = self._cast
        if inputs._version == version and copy.dtype is dtype and is_same(inputs, values):
            return copy
        # The input is held too, so that no other tensor can reuse its memory.
        self._cast = inputs.detach(), inputs._version, inputs.to(dtype)
        return self._cast[2]

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
        if module not in self._taps:
            forward = tapped_forward(name, module, self) or _TappedForward(name, module, self)
            if module in self.slots.mixers:
                own = self.slots.of(module)
                vectors = list(own) if all(len(each.shape) == 1 for each in own.values()) else []
                forward = TappedMixer(name, module, self, vectors=vectors, forward=forward)
            self._taps[module] = forward
        return OtherForward(module, self._taps[module])


class _TappedForward:
    """A module's forward with a tap at its output."""

    def __init__(self, name: str, module: nn.Module, recording: Recording) -> None:
        self._name = name
        self._module: Any = module
        self._recording = recording
        self._forward = module.forward
        self._is_linear = is_plain(module, nn.Linear) and "forward" not in vars(module)

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        recording, module = self._recording, self._module
        if recording.is_preview:
            return self._forward(*positional, **keywords)
        if self._is_linear:
            (inputs,) = positional or keywords.values()
            site = self._site({0: inputs}, (*inputs.shape[:-1], module.out_features))
            recording.count(site)
            given = inputs, module.weight, module.bias, recording.anchor, recording, site
            return Linear.apply(*given)  # type: ignore[no-untyped-call]
        output = self._forward(*positional, **keywords)
        arguments = dict[int | str, Any](enumerate(positional)) | keywords
        tensors = [each for each in arguments.values() if isinstance(each, Tensor)]
        shape = tuple(output.shape) if isinstance(output, Tensor) else None
        return recording.tap(output, self._site(arguments, shape), *tensors)

    def _site(self, arguments: Mapping[int | str, Any], shape: tuple[int, ...] | None) -> CallSite:
        """Return the site of a call: the last one's if they are alike, as a host is slow.

        shape: of the output.
        """
        slots, module, inputs = self._recording.slots, self._module, arguments.get(0)
        is_alone = len(arguments) == 1 and isinstance(inputs, Tensor)
        last = slots.sites.get(module) if is_alone else None
        if last and last.arguments[0] == arguments[0].shape and last.output_shape == shape:
            return last
        site = CallSite(
            name=self._name,
            module=module,
            arguments={
                key: each.shape if isinstance(each, Tensor) else each
                for key, each in arguments.items()
            },
            output_shape=shape,
            parameter_names=list(slots.of(module)),
            is_linear=self._is_linear,
        )
        if is_alone:
            slots.sites[module] = site
        return site


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
        _, recording, ctx.site = place
        ctx.recording, kind = recording, recording.device_type
        if torch.is_autocast_enabled(kind) and weight.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            inputs, weight = recording.cast(inputs, dtype), weight.to(dtype)
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


def _saved(ctx: Any) -> tuple[Tensor, ...]:
    """The saved tensors; raises ValueError, naming the module, if one has changed since."""
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError as error:
        if _CHANGED not in str(error):
            raise
        raise ValueError(
            f"{ctx.site.place} had its input changed in place: gradient norms need it as it was;"
            " use the operation that makes a new tensor"
        ) from error


def _hand_on(ctx: Any, tensors: Sequence[Tensor], gradient: Tensor) -> bool:
    """Hand a call's gradient to what measures; return whether anything does."""
    measuring = ctx.recording.measuring
    if measuring is not None:
        measuring.receive(ctx.site.call(tensors), gradient)
    return measuring is not None


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
