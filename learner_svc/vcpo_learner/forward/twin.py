"""A small model of a model's class: two layers, or one of each kind, and few tokens.

What its modules do with a trajectory shows in it as in the whole, in a fraction of the time and the
memory. Its numbers are random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from vcpo.api.learner import ActivationCheckpointing
from vcpo_learner.forward.activation_checkpointing import (
    are_checkpointed,
    decoder_layers,
    set_checkpoints,
)

_VOCABULARY: Final = 512
_OWN_TO_A_LAYER: Final = {"layer_idx", "training"}


def make_twin(model: nn.Module) -> PreTrainedModel | None:
    """Return a small model with all kinds of a model's layers; None if there is none.

    None also for a model with parameters that are not trained or with layers that its
    configuration does not make: adapters, and what a caller put into it.
    """
    layers = decoder_layers(model)
    if not isinstance(model, PreTrainedModel) or model.config is not model.config.get_text_config():
        return None
    if not all(each.requires_grad for each in model.parameters()):
        return None
    by_layer = [
        name
        for name, value in sorted(model.config.to_dict().items())
        if isinstance(value, list) and len(value) == len(layers)
    ]
    kinds = _kinds(model, by_layer)
    first = sorted(kinds.index(kind) for kind in set(kinds))
    chosen = first if len(first) > 1 else [0, 1]
    if len(chosen) >= len(layers):
        return None
    try:
        twin = _built(model, _with_layers(model.config, chosen, by_layer))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - a family's own code; the model itself is there to be checked
        return None
    is_alike = _kinds(twin, by_layer) == [kinds[at] for at in chosen]
    is_alike = is_alike and _frame(twin) == _frame(model)
    return twin if is_alike else None


def _with_layers(
    config: PretrainedConfig, chosen: Sequence[int], by_layer: Sequence[str]
) -> PretrainedConfig:
    """A configuration with the chosen ones of its layers, and few tokens.

    by_layer: names of the fields that list a value of each layer.
    """
    fields = config.to_dict()
    fields.update({name: [fields[name][at] for at in chosen] for name in by_layer})
    names = config.attribute_map
    fields[names.get("num_hidden_layers", "num_hidden_layers")] = len(chosen)
    fields["vocab_size"] = min(config.vocab_size, _VOCABULARY)
    padding = fields.get("pad_token_id")
    fields["pad_token_id"] = None if padding is None else min(padding, fields["vocab_size"] - 1)
    return type(config).from_dict(fields)


def _built(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    device = model.device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), device:
        torch.manual_seed(0)
        build: Callable[..., PreTrainedModel] = type(model)._from_config
        twin = build(config, dtype=model.dtype)
        for each in twin.parameters():  # a weight that begins at 0 lets no gradient through
            each.data.add_(torch.randn_like(each), alpha=0.02)
    twin.set_attn_implementation(model.config._attn_implementation)
    if are_checkpointed(model):
        set_checkpoints(twin, ActivationCheckpointing.LAYERS)
    twin.train(False)
    return twin


def _kinds(model: PreTrainedModel, by_layer: Sequence[str]) -> list[tuple[Any, ...]]:
    """What makes layers differ: their modules, and what the configuration says of each."""
    fields = model.config.to_dict()
    return [
        tuple(repr(fields[name][at]) for name in by_layer)
        + tuple((name, *_form(each)) for name, each in layer.named_modules())
        for at, layer in enumerate(decoder_layers(model))
    ]


def _form(module: nn.Module) -> tuple[Any, ...]:
    settings = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | None) and name not in _OWN_TO_A_LAYER
    }
    shapes = {name: each.shape for name, each in module.named_parameters(recurse=False)}
    return type(module), repr(settings), repr(shapes)


def _frame(model: nn.Module) -> list[tuple[str, type[nn.Module]]]:
    """The modules outside of the layers."""
    within = {id(each) for layer in decoder_layers(model) for each in layer.modules()}
    return [(name, type(each)) for name, each in model.named_modules() if id(each) not in within]
