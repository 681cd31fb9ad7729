"""Activation checkpointing: the backward pass runs each decoder layer again.

A layer's activations are then in memory one layer at a time, beside the inputs of all layers, for
about a third more time. The library's own switch works in training mode only, and the model stays
in evaluation mode. So each layer's own forward is replaced on the layer; no module gets another
name, and hooks around a layer, such as FSDP's, run once.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from vcpo.api.learner import ActivationCheckpointing
from vcpo_learner.forward.router_replay import active_replay
from vcpo_learner.per_sample_gradients.taps import recomputation_contexts

_LARGE = 1_000_000_000
"""Parameters from which `auto` saves memory rather than time."""


def wants_checkpoints(setting: ActivationCheckpointing, num_parameters: int) -> bool:
    """Return whether layers of a model of this size are computed twice."""
    if setting is ActivationCheckpointing.AUTO:
        return num_parameters >= _LARGE
    return setting is ActivationCheckpointing.LAYERS


def set_checkpoints(model: nn.Module, setting: ActivationCheckpointing) -> None:
    """Let a model's decoder layers keep their activations or compute them again, as a run wants.

    Parameters that are not trained count for the size as well.
    """
    is_on = wants_checkpoints(setting, sum(each.numel() for each in model.parameters()))
    for layer in decoder_layers(model):
        if isinstance(layer.forward, _CheckpointedForward):
            del layer.forward
        if is_on:
            layer.forward = _CheckpointedForward(layer)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformers model that its activations can be dropped between."""
    return [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]


class _Contexts:
    """Contexts that are entered together, any number of times."""

    def __init__(self, *contexts: AbstractContextManager[object]) -> None:
        self._contexts = contexts
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for each in self._contexts:
            self._stack.enter_context(each)

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def _contexts(
    layer: nn.Module,
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Contexts of a layer's first run and of those after it, in which its routers choose again."""
    first, again = recomputation_contexts(layer)
    replay = active_replay()
    return first, again if replay is None else _Contexts(again, replay.within(layer))


class _CheckpointedForward:
    """A layer's forward that autograd runs again; without gradients, the forward itself."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._forward: Callable[..., Any] = layer.forward

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*arguments, **keywords)
        return checkpoint(
            self._forward,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(_contexts, self._layer),
            **keywords,
        )
