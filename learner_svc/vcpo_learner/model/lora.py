"""LoRA adapters: added to a model before training, and merged into it at the end.

A linear layer W [rows, columns] becomes W + (alpha / rank) B A with A [rank, columns] random and B
[rows, rank] zero, so the first version computes the same as the model without adapters. Only A and
B are trained, published and kept in checkpoints. Their names in the model are
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
from vcpo_learner.checkpoints.disk import write_tensors

_ADAPTER = "default"
"""peft's name of the only adapter; its files omit the name."""


def add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Freeze a model's parameters and add adapters to its linear layers, in place.

    Raises:
        StartError: naming the field, if no layer has one of the given names.
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
            " model; name linear layers, such as 'q_proj', or give none to adapt all of them"
        ) from error


def merge_adapters(model: PreTrainedModel) -> None:
    """Merge the adapters into their layers and remove them, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())


def save_adapters(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], settings: Model, folder: Path
) -> None:
    """Write adapters that `PeftModel.from_pretrained(base, folder)` reads.

    tensors: of the adapters, by their names in the model.
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
