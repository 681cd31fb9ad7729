"""Low-rank adapters: put into a model before training, and melted into it afterwards.

A linear layer W [rows, columns] becomes W + (alpha / rank) B A with A [rank, columns] random and B
[rows, rank] zero, so that the first version is the model as it was. Only A and B are trained,
published and kept in checkpoints. The adapters stand inside the model's own layers, by the names
`<layer>.lora_A.default.weight` and `<layer>.lora_B.default.weight`.

Source: LoRA, arXiv 2106.09685; layers and initialization of the peft library.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import cast

from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel

from vcpo.service.lifecycle import StartError
from vcpo.spec.workloads import Lora, Model
from vcpo_learner.model.disk import write_tensors

_ADAPTER = "default"
"""The peft library's word for the only adapter; its files leave it out of the names."""


def add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Freeze a model's parameters and put adapters beside its linear layers, in place.

    Raises: StartError, naming the field, when no layer has one of the names wanted.
    """
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.target_modules) or "all-linear",
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        get_peft_model(model, config)
    except ValueError as error:
        raise StartError(
            f"spec.model.lora.targetModules: {list(lora.target_modules)} fits no layer of the"
            " model; name linear layers, such as 'q_proj', or leave it empty for all of them"
        ) from error


def merge_adapters(model: PreTrainedModel) -> None:
    """Melt the adapters into the layers beside which they stand, in place, and take them out."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())


def save_adapters(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], settings: Model, folder: Path
) -> None:
    """Write adapters as peft reads them: `PeftModel.from_pretrained(base, folder)`.

    tensors: the adapters' own, by their names in the model.
    """
    config = copy(cast("LoraConfig", model.peft_config[_ADAPTER]))
    config.base_model_name_or_path = settings.name
    config.revision = settings.revision
    config.inference_mode = True
    config.save_pretrained(str(folder))
    named = {
        f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": tensor
        for name, tensor in tensors.items()
    }
    write_tensors(named, folder / "adapter_model.safetensors")
