"""Taps: places at the outputs of modules where a backward pass hands over what it knows.

A tap is the identity on a module's output. In the forward pass autograd saves the module's inputs
for it; in the backward pass it hands them on with the gradient at the output. So the inputs live as
long as what autograd saves itself, and activation checkpointing drops and computes them again like
everything else. (A recording that holds the inputs would keep them, and checkpointing would save
nothing.)

All taps lead to one scalar that needs a gradient, the anchor. A backward pass that asks for the
anchor's gradient goes by every tap that the objective depends on and forms no parameter's gradient.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vcpo_learner.per_sample_gradients.experts import ExpertCall, ExpertSite
from vcpo_learner.per_sample_gradients.mixtures import OtherForward, tapped_forward
from vcpo_learner.per_sample_gradients.module_calls import CallSite, ModuleCall, is_plain
from vcpo_learner.per_sample_gradients.slots import Slot, Slots
from vcpo_learner.per_sample_gradients.weighted_sum import WeightedSum

_CHANGED = "modified by an inplace operation"
"""Part of autograd's message if a saved tensor was written to."""


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


class Removable(Protocol):
    """What can be taken off a module again."""

    def remove(self) -> None:
        """Leave the module as it was."""


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
        """Uses of each slot in the forward pass; recomputations do not count."""
        self.num_expected: Counter[Slot] = Counter()
        """Uses of each slot that are no call of its module: they measure themselves."""
        self.measuring: Measuring | None = None
        """The object that the uses hand their gradients to in a backward pass; None outside of
        one."""
        self._used: list[nn.Parameter] = []
        self._taps: dict[nn.Module, _ModuleTap] = {}
        self._is_recomputing = False

    def expect(self, slot: Slot) -> None:
        """Count a use of a slot outside of its module's forward, which will measure itself."""
        self.num_uses[slot] += 1
        self.num_expected[slot] += 1
        self._used.append(self.slots.parameter(slot))

    @property
    def parameters(self) -> set[int]:
        """Identities of the parameters in recorded calls and uses, as these used them."""
        return {id(each) for each in self._used}

    def backward(self, objective: Tensor, measuring: Measuring, *, retain_graph: bool) -> None:
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

        output: without a tap if it is no tensor, or needs no gradient.
        tensors: the call's tensor arguments, in their order.
        """
        own = self.slots.of(site.module)
        slots = [own[name] for name in site.parameter_names if name in own]
        if not slots:
            return output
        if not self._is_recomputing:
            for slot in slots:
                self.num_uses[slot] += 1
            self._used.extend(site.parameters)
            if isinstance(site, CallSite):
                self.sites.append(site)
        if not (isinstance(output, Tensor) and output.requires_grad):
            return output
        return Tap.apply(output, self.anchor, self, site, tensors)  # type: ignore[no-untyped-call]

    def tap_modules(self, root: nn.Module | None = None) -> list[Removable]:
        """Tap all modules, or those within `root`, until the handles are removed."""
        return [self._tap_module(name, module) for name, module in self.slots.modules(root)]

    def _tap_module(self, name: str, module: nn.Module) -> Removable:
        if module not in self._taps:
            self._taps[module] = _ModuleTap(name, module, self)
        return self._taps[module].place()


class _ModuleTap:
    """A tap for the outputs of one module; it keeps the site of a call for those that are alike.

    A host's time for the taps of all modules is a large part of that for a small model.
    """

    def __init__(self, name: str, module: nn.Module, recording: Recording) -> None:
        self._name = name
        self._module = module
        self._recording = recording
        self._forward = tapped_forward(name, module, recording)
        """In the place of the module's own; None if its output is tapped."""
        self._last: CallSite | None = None

    def place(self) -> Removable:
        """Put the tap on the module."""
        if self._forward is not None:
            return OtherForward(self._module, self._forward)
        return self._module.register_forward_hook(self, with_kwargs=True)

    def __call__(
        self,
        module: nn.Module,
        positional: tuple[Any, ...],
        keywords: dict[str, Any],
        output: Any,
    ) -> Any:
        if len(positional) == 1 and not keywords and isinstance(positional[0], Tensor):
            inputs, last = positional[0], self._last
            is_alike = last is not None and last.is_alike(inputs, output)
            site = last if last is not None and is_alike else self._site({0: inputs}, output)
            self._last = site
            return self._recording.tap(output, site, inputs)
        arguments = dict[int | str, Any](enumerate(positional)) | keywords
        tensors = [each for each in arguments.values() if isinstance(each, Tensor)]
        return self._recording.tap(output, self._site(arguments, output), *tensors)

    def _site(self, arguments: Mapping[int | str, Any], output: Any) -> CallSite:
        module = self._module
        return CallSite(
            name=self._name,
            module=module,
            arguments={
                key: each.shape if isinstance(each, Tensor) else each
                for key, each in arguments.items()
            },
            output_shape=tuple(output.shape) if isinstance(output, Tensor) else None,
            parameter_names=list(self._recording.slots.of(module)),
            is_linear=is_plain(module, nn.Linear) and arguments.keys() == {0},
        )


class Tap(torch.autograd.Function):
    """The identity; in a measuring backward pass it hands on the call and the gradient here."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        anchor: Tensor,
        recording: Recording,
        site: CallSite | ExpertSite,
        tensors: Sequence[Tensor],
    ) -> Tensor:
        """Return the output; tensors: the call's tensor arguments, in their order."""
        ctx.recording, ctx.site = recording, site
        ctx.save_for_backward(*(each.detach() for each in tensors))
        # Not a view: a later module may write into it.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Hand on the gradient, and return it."""
        (gradient,) = gradients
        if ctx.recording.measuring is not None:
            try:
                tensors = ctx.saved_tensors
            except RuntimeError as error:
                if _CHANGED not in str(error):
                    raise
                raise ValueError(
                    f"{ctx.site.place} had its input changed in place: gradient norms need it as"
                    " it was; use the operation that makes a new tensor"
                ) from error
            ctx.recording.measuring.receive(ctx.site.call(tensors), gradient)
        return gradient, None, None, None, None


class Recomputation:
    """A context, entered for each recomputation, in which modules are tapped as before.

    Checkpointing pairs what autograd saves in the recomputation with what it saved before, so both
    must save the same.
    """

    def __init__(self, recording: Recording, root: nn.Module) -> None:
        self._recording = recording
        self._root = root
        self._handles: list[Removable] = []

    def __enter__(self) -> None:
        self._recording._is_recomputing = True
        self._handles = self._recording.tap_modules(self._root)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._recording._is_recomputing = False


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


def recomputation_contexts(
    root: nn.Module,
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return the contexts of the first run of a checkpointed module, and of those after it.

    It is the `context_fn` of `torch.utils.checkpoint.checkpoint`, which calls it in the forward
    pass. Checkpoints without it fail on a recorded model: too few tensors are saved again.
    """
    recording = active_recording()
    return nullcontext(), nullcontext() if recording is None else Recomputation(recording, root)
