"""The policy under training: loading it, writing it as a version, putting one back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor
from torch.nn import Module
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vcpo.service.lifecycle import StartError
from vcpo.spec import VCPORunSpec
from vcpo.spec.workloads import Lora, Precision

_DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}


class ModelLoadError(StartError):
    """A model that cannot be loaded; names the field, the value and the cure."""

    def __init__(self, name: str, cause: Exception) -> None:
        super().__init__(
            f"spec.model.name: cannot load '{name}' ({type(cause).__name__}: {_first_line(cause)});"
            " give a directory with config.json, model.safetensors and tokenizer files, or a hub"
            " name while the hub is reachable (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE apply)"
        )


def load_policy(
    name: str, revision: str | None, lora: Lora | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load weights (as float32) and tokenizer from a directory or the hub.

    lora: adapters to train in place of the weights; None trains all of them.

    Raises:
        ModelLoadError: when either cannot be had.
        StartError: when the adapters fit nowhere.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, revision=revision, dtype=torch.float32, use_safetensors=True
        )
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelLoadError(name, error) from error
    if lora is not None:
        # The library behind them takes seconds to import; few runs want it.
        from vcpo_learner.model.lora import add_adapters

        add_adapters(model, lora)
    return model, tokenizer


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills short rows; any will do, since it is masked everywhere."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token_id, int):
            return token_id
    return 0


def published_precision(spec: VCPORunSpec) -> Precision:
    """The narrowest number format in which every rollout group gets the values it generates with.

    A bfloat16 worker rounds float32 weights when it loads them, so rounding them before they
    travel gives it the same values and half the bytes. Adapters are multiplied first.
    """
    wide = any(group.precision is Precision.FLOAT32 for group in spec.rollouts)
    return Precision.FLOAT32 if wide or spec.model.lora is not None else Precision.BFLOAT16


def policy_payload(model: PreTrainedModel, precision: Precision) -> bytes:
    """What is trained as one safetensors file; one shared by two modules stands once."""
    return save(policy_tensors(model, _DTYPES[precision]))


def policy_tensors(
    model: PreTrainedModel, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Copies of the trainable parameters on the CPU, rounded to `dtype`.

    Each stands once, under its first name.

    What training does not change stays out: buffers, and all but the adapters where there are any.
    """
    return {
        name: parameter.detach().to(dtype).to("cpu", copy=True).contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def restore_policy(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put saved tensors back, in place.

    Raises:
        ValueError: when a name or shape does not fit the model.
    """
    with torch.no_grad():
        own = dict(model.named_parameters())
        for name, tensor in tensors.items():
            if name not in own or own[name].shape != tensor.shape:
                raise ValueError(f"tensor {name}: does not fit the model of the run")
            own[name].copy_(tensor)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else "no details"


def vocabulary_size(model: PreTrainedModel) -> int:
    """Tokens with a row in the embedding and in the head, rows for padding included."""
    head: Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weights = [model.get_input_embeddings().weight, *([head.weight] if head is not None else [])]
    return min(len(weight) for weight in weights if isinstance(weight, Tensor))
