"""A model without its parameters, and the parameters that a rank needs, read from files.

A model that is cut over ranks need not fit on one of them. So each rank builds the model with
parameters on `meta`, which take no memory, cuts it, and reads its own slices of the safetensors
files. One rank does the same: transformers writes zeros over what it has read of some families
(Youtu's row of the padding token). Buffers, such as rotary frequencies, are computed when the model
is built; they are real.
"""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vcpo.api.workloads import Model, Precision
from vcpo.service.model_files import local_model
from vcpo.service.rotary_table import fix_rotary_table
from vcpo_learner.checkpoints.tensor_files import read_tensors
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.model.loading import (
    UNLOADABLE,
    ModelLoadError,
    account_for,
    check_config,
    choose_trained,
    hold_base_short,
    load_policy,
    load_vocabulary,
    require_finite,
)
from vcpo_learner.policy_state import persistent_buffers
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.ranks.sharding import place_model

_LOGGER = logging.getLogger(__name__)


def load_on_ranks(
    settings: Model, ranks: Ranks, precision: Precision, context_tokens: int | None = None
) -> tuple[PolicyNetwork, PreTrainedTokenizerBase]:
    """Load the policy of a run onto its ranks, and its tokenizer; all ranks call it.

    Each rank reads its own shards. It has transformers load the whole model if the files have other
    names for the parameters.

    context_tokens: longest prompt and response of the run; None for the model's context.
    """
    name, revision = local_model(settings.name), settings.revision
    trust = settings.trust_remote_code
    skeleton = build_skeleton(name, revision, context_tokens, trust_remote_code=trust)
    folder = _weights_folder(name, revision)
    is_whole = not holds_parameters(folder, skeleton)
    if is_whole:
        model, tokenizer = load_policy(
            name, revision, settings.lora, context_tokens, trust_remote_code=trust
        )
    else:
        model = skeleton
        account_for(name, model, missing=(), unused=unused_tensors(folder, model))
        tokenizer = load_vocabulary(model, name, revision, trust_remote_code=trust)
        choose_trained(model, settings.lora)
    if settings.lora is not None and ranks.communication is None:
        hold_base_short(model, precision)
    network = PolicyNetwork(model)
    if is_whole or ranks.communication is not None:  # one rank has nothing to cut
        place_model(network, ranks, precision)
    if not is_whole:
        fill_skeleton(network, folder, ranks.device, ranks.checkpoint_group)
        require_finite(name, network.model)
    return network, tokenizer


def build_skeleton(
    name: str,
    revision: str | None,
    context_tokens: int | None = None,
    *,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build a model from its configuration; its parameters are float32 on `meta`.

    The model's `config.dtype` is that of the files, in which an export is written.

    context_tokens: longest prompt and response of the run; None for the model's context.
    """
    dtype = check_config(name, revision, trust_remote_code=trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call] # it has no annotations
                config, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
    except UNLOADABLE as error:
        raise ModelLoadError(name, error) from error
    own, named = type(model).__name__, config.architectures or []
    if named and own not in named:
        _LOGGER.warning("of the %s in '%s' only %s is trained and exported", named[0], name, own)
    model.config.dtype = dtype
    model.tie_weights()
    fix_rotary_table(model, context_tokens)
    with contextlib.suppress(OSError):  # few models have none
        model.generation_config = GenerationConfig.from_pretrained(
            name, revision=revision or "main"
        )
    nn.Module.eval(model)  # transformers wraps it without a type
    return model


def holds_parameters(folder: Path, model: nn.Module) -> bool:
    """Return whether a model's files hold its tensors under their names and in their shapes."""
    saved = _saved_tensors(folder)
    for name, tensor in _tensors(model).items():
        there = saved.get(name)
        if not isinstance(there, TensorStorageMetadata) or there.size != tensor.shape:
            return False
    return True


def unused_tensors(folder: Path, model: nn.Module) -> set[str]:
    """Return the tensors of a model's files that it has no place for, by name."""
    return set(_saved_tensors(folder)) - model.state_dict().keys()


def fill_skeleton(
    network: PolicyNetwork,
    folder: Path,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Give a skeleton memory on a device, and read its parameters; of DTensors, the local shards.

    All ranks call it. Buffers and adapters, which are no part of the files, move to the device.

    folder: with files for which `holds_parameters` is true.
    """
    # As `Module.to_empty`, but buffers keep their numbers; FSDP takes the new shards in.
    network._apply(lambda each: _move(each, device))  # type: ignore[no-untyped-call] # torch's
    if not any(isinstance(each, DTensor) for each in network.parameters()):
        cast("PreTrainedModel", network.model).tie_weights()  # FSDP keeps ties, `_apply` does not
    tensors = {name: each.detach() for name, each in _tensors(network.model).items()}
    try:
        with torch.no_grad():
            read_tensors(folder, tensors, group)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(str(folder), error) from error


def _saved_tensors(folder: Path) -> Mapping[str, object]:
    return HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what a model's files hold, by name there, each tensor once; of adapters, the base."""
    held = {**dict(model.named_parameters()), **persistent_buffers(model)}
    return {
        name.replace(".base_layer.", "."): each
        for name, each in held.items()
        if ".lora_A." not in name and ".lora_B." not in name
    }


def _weights_folder(name: str, revision: str | None) -> Path:
    """Return a model's folder; download its weights from the hub if they are not here."""
    if Path(name).is_dir():
        return Path(name)
    try:
        patterns = ["*.safetensors", "*.json"]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ModelLoadError(name, error) from error


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
