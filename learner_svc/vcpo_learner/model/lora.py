"""LoRA adapters: added to a model before training, and merged into it at the end.

A linear layer W [rows, columns] becomes W + (alpha / rank) B A with A [rank, columns] random and B
[rows, rank] zero, so the first version computes the same as the model without adapters. Only A and
B are trained, published and kept in checkpoints. In a mixture of experts the layers of its MLPs get
none: transformers holds all experts of a layer in one tensor, and peft's adapters of a part of it
would have a form that neither workers nor vLLM know.

Source: LoRA, arXiv 2106.09685; layers and initialization of the peft library.
"""

from collections.abc import Mapping, Set
from copy import copy
from pathlib import Path
from typing import cast

from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Linear, Module
from transformers import PreTrainedModel

from vcpo.api.workloads import Lora, Model
from vcpo.service.lifecycle import StartError
from vcpo_learner.per_sample_gradients.mixers import uncalled_linear
from vcpo_learner.per_sample_gradients.mixtures import is_mixture
from vcpo_learner.per_sample_gradients.module_calls import is_plain

_ADAPTER = "default"
"""peft's name of the only adapter; its files omit the name."""
_TAKEN_FOR_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Last parts of layers' names that peft takes for experts, in the models that it knows."""
_WITH_MAMBA = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""Families in which peft refuses adapters at `out_proj`, which kernels use uncalled."""


def add_adapters(model: PreTrainedModel, lora: Lora) -> None:
    """Freeze a model's parameters and add adapters to its linear layers, in place.

    Beside parameters on `meta` the adapters have memory on the CPU.
    """
    wanted = frozenset(lora.target_modules)
    refused = sorted(wanted & _TAKEN_FOR_EXPERTS) if is_mixture(model) else []
    if refused:
        raise StartError(
            f"spec.model.lora.targetModules: {refused} are layers of the MLPs of a mixture of"
            " experts, which get no adapters; name layers of its attention, such as 'q_proj', or"
            " give none to adapt all that can be"
        )
    if "dt_proj" in wanted and any(map(uncalled_linear, model.modules())):
        raise StartError(
            "spec.model.lora.targetModules: 'dt_proj' is a layer that Mamba's layers use without a"
            " call, where an adapter would do nothing; leave it out"
        )
    layers = linear_layers(model, wanted)
    if not layers:
        raise StartError(
            f"spec.model.lora.targetModules: {list(lora.target_modules)} fits no layer of the"
            " model; name linear layers, such as 'q_proj', or give none to adapt all of them"
        )
    embeddings = model.get_input_embeddings().weight
    if shared := [name for name in layers if model.get_submodule(name).weight is embeddings]:
        raise StartError(
            f"spec.model.lora.targetModules: {shared} shares its matrix with the embeddings"
            " (tie_word_embeddings), which would change with it wherever its adapter is merged;"
            " leave it out"
        )
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=layers,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        get_peft_model(model, config)
    except ValueError as error:  # of layers that a model uses without calling them, as Mamba's
        raise StartError(
            f"spec.model.lora.targetModules: {list(lora.target_modules)}: {error}"
            " Name the layers that get an adapter, such as 'q_proj'"
        ) from error
    _initialize_on_meta(model)


def _initialize_on_meta(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, LoraLayer) and module.lora_A[_ADAPTER].weight.is_meta:
            module.lora_A[_ADAPTER].to_empty(device="cpu")
            module.lora_B[_ADAPTER].to_empty(device="cpu")
            module.reset_lora_parameters(_ADAPTER, True)  # type: ignore[no-untyped-call] # peft's


def linear_layers(model: PreTrainedModel, wanted: Set[str]) -> list[str]:
    """Return the names of the layers that get an adapter.

    They are all that multiply by a matrix and do nothing else, but in a mixture of experts the
    layers of its MLPs and of its routers, which use weights uncalled. So do kernels of Mamba, and
    its first form its time steps.

    wanted: last parts of the names; if empty, all layers but the output head.
    """
    head: Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    left_out = _TAKEN_FOR_EXPERTS if is_mixture(model) else frozenset()
    if not wanted and model.config.model_type in _WITH_MAMBA:
        left_out |= {"out_proj"}
    return [
        name
        for name, module in model.named_modules()
        if is_plain(module, Linear)
        and (name.rpartition(".")[2] in wanted if wanted else module is not head)
        and name.rpartition(".")[2] not in left_out
        and not hasattr(parent := model.get_submodule(name.rpartition(".")[0]), "top_k")
        and uncalled_linear(parent) is not module
    ]


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
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
