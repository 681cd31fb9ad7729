"""A directory with a tiny model of a family: random parameters, and random state beside them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.model_families.families import Family

_TOKENIZER: Final = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny"
END_TOKEN_ID: Final = 1
FIRST_TOKEN_ID: Final = 5
"""Tokens below it are the tokenizer's own."""
_TRAINED_BUFFERS: Final = ("bias", "scalar")
"""Parts of the names of buffers that training changes, such as a router's correction bias."""


def save_model(family: Family, folder: Path) -> None:
    """Make a model and write it as `from_pretrained` reads it."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(family.config())  # type: ignore[no-untyped-call] # transformers'
    change_state(model, 0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(_TOKENIZER).save_pretrained(folder)
    generation = json.dumps({"eos_token_id": END_TOKEN_ID})
    (folder / "generation_config.json").write_text(generation, encoding="utf-8")


@torch.no_grad()
def change_state(model: nn.Module, scale: float) -> None:
    """Add noise to all that training may change, so that nothing is 0 or 1 as a model begins.

    scale: standard deviation of what is added to a vector; matrices get a tenth of it, and a
        router's biases, which are small beside its scores, three times as much. Beside adapters
        nothing else changes.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=scale / 10 ** (parameter.ndim > 1))
    if not any("lora_" in name for name, _ in model.named_parameters()):
        for buffer in trained_buffers(model):
            buffer.add_(torch.randn_like(buffer), alpha=3 * scale)


def trained_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of a model's files that training changes; some are frozen parameters."""
    saved = model.state_dict()
    frozen = [each for each in model.named_parameters() if not each[1].requires_grad]
    for name, buffer in [*model.named_buffers(), *frozen]:
        is_trained = any(word in name.rpartition(".")[2] for word in _TRAINED_BUFFERS)
        if name in saved and is_trained and buffer.is_floating_point():
            yield buffer
