"""Activation checkpointing: the backward pass runs each decoder layer again.

A layer's activations are then in memory one layer at a time, beside the inputs of all layers, for
about a third more time. The library's own switch works in training mode only, and the model stays
in evaluation mode. So each layer's own forward is replaced on the layer; no module gets another
name, and hooks around a layer, such as FSDP's, run once.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers.modeling_layers import GradientCheckpointingLayer

from vcpo.api.learner import ActivationCheckpointing
from vcpo_learner.forward.packed_rows import active_row, unpacked_mixers
from vcpo_learner.forward.router_replay import active_replay
from vcpo_learner.per_sample_gradients.taps import active_recording, require_coverage

_LARGE = 1_000_000_000
"""Parameters from which `auto` saves memory, where no plan of a GPU's memory decides."""


def set_checkpoints(model: nn.Module, setting: ActivationCheckpointing) -> None:
    """Let a model's decoder layers keep their activations or compute them again, as a run wants.

    Parameters that are not trained count for the size as well.
    """
    is_large = sum(each.numel() for each in model.parameters()) >= _LARGE
    is_on = setting is ActivationCheckpointing.LAYERS
    is_on = is_on or (setting is ActivationCheckpointing.AUTO and is_large)
    for layer in decoder_layers(model):
        if isinstance(layer.forward, _CheckpointedForward):
            del layer.forward
        if is_on:
            layer.forward = _CheckpointedForward(layer)


def are_checkpointed(model: nn.Module) -> bool:
    """Return whether a model's decoder layers compute their activations again."""
    return any(isinstance(each.forward, _CheckpointedForward) for each in decoder_layers(model))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformers model that its activations can be dropped between."""
    return [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]


class _CheckpointedForward:
    """A layer's forward that the backward pass runs again; without gradients, itself."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._forward: Callable[..., Any] = layer.forward

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*arguments, **keywords)
        if "past_key_values" in keywords:
            # The second run would find the first one's keys in it, which have no graph.
            keywords["past_key_values"] = None
        leaves, layout = tree_flatten((arguments, keywords))
        run = _Run(self._layer, self._forward, leaves, layout)
        outputs = _RunAgain.apply(run, run.anchor, *run.tensors)  # type: ignore[no-untyped-call]
        return tree_unflatten(outputs, run.output_layout)


class _Run:
    """A run of a layer, and all that another run like it needs but the tensors it is given."""

    def __init__(
        self, layer: nn.Module, forward: Callable[..., Any], leaves: Sequence[Any], layout: TreeSpec
    ) -> None:
        """leaves: of the arguments; layout: how they make up the arguments."""
        self.recording = active_recording()
        self.anchor = (
            torch.zeros((), requires_grad=True) if self.recording is None else self.recording.anchor
        )
        """So that a backward pass comes by, also if no tensor given to the layer needs it."""
        self.tensors = [each for each in leaves if isinstance(each, Tensor)]
        """Until the first run."""
        self.output_layout: TreeSpec
        self._layer = layer
        self._forward = forward
        self._leaves = [Tensor if isinstance(each, Tensor) else each for each in leaves]
        self._layout = layout
        self._replay = active_replay()
        self._row = active_row()
        device = next((each.device.type for each in self.tensors), "cpu")
        self._autocast = partial(
            torch.autocast,
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=False,  # what is cast in the first run has no graph
        )

    def first(self) -> tuple[Any, ...]:
        """Return the outputs, without a graph."""
        tensors, self.tensors = self.tensors, []
        if self.recording is None:
            return self._outputs(tensors)
        with self.recording.preview(self._layer):
            return self._outputs(tensors)

    def again(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the outputs once more, with taps if the backward pass measures."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if self.recording is not None:
                stack.enter_context(self.recording.rerun(self._layer))
            if self._replay is not None:
                stack.enter_context(self._replay.within(self._layer))
            stack.enter_context(unpacked_mixers(self._layer, self._row))
            return self._outputs(tensors)

    def _outputs(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        given = iter(tensors)
        leaves = [next(given) if each is Tensor else each for each in self._leaves]
        arguments, keywords = tree_unflatten(leaves, self._layout)
        with self._autocast():
            outputs, self.output_layout = tree_flatten(self._forward(*arguments, **keywords))
        return tuple(outputs)


class _RunAgain(torch.autograd.Function):
    """Outputs of a layer whose graph is made, and gone through, in the backward pass only."""

    @staticmethod
    def forward(ctx: Any, run: _Run, anchor: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
        """Run the layer; tensors: those among its arguments."""
        ctx.run = run
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return run.first()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the layer again, and go through its graph as the backward pass at hand does."""
        run: _Run = ctx.run
        tensors = [
            each.detach().requires_grad_(is_needed)
            for each, is_needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        pairs = [
            (output, gradient)
            for output, gradient in zip(run.again(tensors), gradients, strict=True)
            if gradient is not None
        ]
        outputs, given = [each for each, _ in pairs], [each for _, each in pairs]
        recording = run.recording
        if recording is None or recording.measuring is None:
            torch.autograd.backward(outputs, given)
            return None, None, *(each.grad for each in tensors)
        if not recording.is_rerun_whole:
            for output in outputs:
                require_coverage(output, recording)
        wanted = [each for each in tensors if each.requires_grad]
        ends = [*wanted, run.anchor]
        found = iter(torch.autograd.grad(outputs, ends, given, allow_unused=True))
        return None, None, *(next(found) if each.requires_grad else None for each in tensors)
