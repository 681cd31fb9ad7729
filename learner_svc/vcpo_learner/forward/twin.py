"""A small model of a model's class: two layers, or one of each kind, few tokens, random numbers.

What its modules do with a trajectory shows in it as in the whole, in a fraction of the time.
"""

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
from vcpo_learner.forward.fused_layers import fuse_like

_VOCABULARY: Final = 512


def make_twin(model: nn.Module) -> PreTrainedModel | None:
    """Return a small model with all kinds of a model's layers; None if there is none.

    None also for a model with parameters that are not trained, or with modules that its
    configuration does not make.
    """
    layers = decoder_layers(model)
    if not isinstance(model, PreTrainedModel) or model.config is not model.config.get_text_config():
        return None
    if not all(each.requires_grad for each in model.parameters()):
        return None
    fields = model.config.to_dict()
    by_layer = [
        name
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == len(layers)
    ]
    kinds = _kinds(model, by_layer)
    first = sorted(kinds.index(kind) for kind in set(kinds))
    chosen = first if len(first) > 1 else [0, 1]
    if len(chosen) >= len(layers):
        return None
    fields.update({name: [fields[name][at] for at in chosen] for name in by_layer})
    number = model.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    fields |= {number: len(chosen), "vocab_size": min(model.config.vocab_size, _VOCABULARY)}
    fields["pad_token_id"] = min(fields.get("pad_token_id") or 0, fields["vocab_size"] - 1)
    try:
        twin = _built(model, type(model.config).from_dict(fields))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - a family's own code; the model itself is there to be checked
        return None
    if _frame(twin) != _frame(model) or _kinds(twin, by_layer) != [kinds[at] for at in chosen]:
        return None
    for at, layer in zip(chosen, decoder_layers(twin), strict=True):
        fuse_like(layer, layers[at])
    return twin


def _built(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    device = model.device
    build: Callable[..., PreTrainedModel] = type(model)._from_config
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
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
        (repr([fields[name][at] for name in by_layer]), *map(_form, layer.named_modules()))
        for at, layer in enumerate(decoder_layers(model))
    ]


def _form(named: tuple[str, nn.Module]) -> tuple[Any, ...]:
    name, module = named
    settings = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | None) and name not in ("layer_idx", "training")
    }
    shapes = [each.shape for each in module.parameters(recurse=False)]
    return name, type(module), repr(settings), repr(shapes)


def _frame(model: nn.Module) -> list[tuple[str, type[nn.Module]]]:
    """The modules outside of the layers."""
    within = {id(each) for layer in decoder_layers(model) for each in layer.modules()}
    return [(name, type(each)) for name, each in model.named_modules() if id(each) not in within]
