"""A model without its parameters, and the parameters that a rank needs, read from files.

A model that is cut over ranks need not fit on one of them. So each rank builds the model with
parameters on `meta`, which take no memory, cuts it, and reads its own slices of the safetensors
files. Buffers, such as rotary frequencies, are computed when the model is built; they are real.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from vcpo_learner.checkpoints.tensor_files import read_tensors
from vcpo_learner.model.loading import ModelLoadError


class UnsuitedFilesError(ValueError):
    """The files of a model do not hold its parameters under their names; load it whole."""


def build_skeleton(name: str, revision: str | None) -> PreTrainedModel:
    """Build a model from its configuration; its parameters are float32 on `meta`.

    Raises:
        ModelLoadError: if there is no such model.
    """
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call] # it has no annotations
                config, dtype=torch.float32
            )
    except (OSError, ValueError) as error:
        raise ModelLoadError(name, error) from error
    model.tie_weights()
    with contextlib.suppress(OSError):  # few models have none
        model.generation_config = GenerationConfig.from_pretrained(
            name, revision=revision or "main"
        )
    nn.Module.eval(model)  # transformers wraps it without a type
    return model


def fill_skeleton(
    model: PreTrainedModel,
    source: tuple[str, str | None],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Give a skeleton memory on a device, and read its parameters; of DTensors, the local shards.

    All ranks call it. Buffers move to the device.

    source: directory or name on the hub, and revision.

    Raises:
        UnsuitedFilesError: before anything changes, if files and model differ in their names.
        ModelLoadError: if the files cannot be read.
    """
    name, revision = source
    try:
        folder = _files_folder(name, revision)
        wanted = {**dict(model.named_parameters()), **persistent_buffers(model)}
        reader = HuggingFaceStorageReader(str(folder))
        _check_names(reader, wanted)
        # As `Module.to_empty`, but buffers keep their numbers; FSDP takes the new shards in.
        model._apply(lambda each: _moved(each, device))  # type: ignore[no-untyped-call] # torch's
        if not any(isinstance(each, DTensor) for each in model.parameters()):
            model.tie_weights()  # FSDP keeps ties, `_apply` does not
        filled = {**dict(model.named_parameters()), **persistent_buffers(model)}
        with torch.no_grad():
            read_tensors(reader, {key: each.detach() for key, each in filled.items()}, group)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(name, error) from error


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to a model's files; few families have any."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    own = model.state_dict()
    return {name: buffer for name, buffer in own.items() if name not in parameters}


def _files_folder(name: str, revision: str | None) -> Path:
    if Path(name).is_dir():
        return Path(name)
    patterns = ["*.safetensors", "*.json"]
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def _check_names(reader: HuggingFaceStorageReader, wanted: dict[str, Tensor]) -> None:
    saved = reader.read_metadata().state_dict_metadata
    for name, tensor in wanted.items():
        there = saved.get(name)
        if not isinstance(there, TensorStorageMetadata) or there.size != tensor.shape:
            raise UnsuitedFilesError(f"tensor {name}: is not in the files in this shape")


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
