"""The output head of a transformers model: its layer, and how its products become logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from vcpo_learner.output_head.logit_tiles import LogitForm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelHead:
    """A linear head on the last hidden states of a decoder."""

    decoder: nn.Module
    """Returns `.last_hidden_state` [rows, tokens, hidden]."""
    linear: nn.Linear
    form: LogitForm


def model_head(model: nn.Module) -> ModelHead | None:
    """Return a causal language model's head, or None if it is of no known kind.

    What its configuration does not say (a family that changes hidden states before the head) is not
    known here: compare its numbers with the model's own logits.
    """
    decoder = getattr(model, "base_model", None)
    named = getattr(model, "get_output_embeddings", None)
    linear = None if named is None else named()
    if not isinstance(decoder, nn.Module) or decoder is model:
        return None
    # An adapted or quantized layer has a forward of its own.
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        return None
    return ModelHead(decoder=decoder, linear=linear, form=_form(model))


def _form(model: Any) -> LogitForm:
    config = model.config.get_text_config()
    divisor = getattr(config, "logits_scaling", None)  # Granite
    factor = getattr(config, "logit_scale", None)  # Cohere
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
    scale = 1.0 if factor is None else float(factor)
    return LogitForm(scale=scale / float(divisor or 1.0), softcap=softcap)
