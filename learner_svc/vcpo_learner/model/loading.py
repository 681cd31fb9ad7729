"""The policy that is trained: loading it, and copying its state."""

import logging
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vcpo.api.workloads import Lora, Precision
from vcpo.service.lifecycle import StartError
from vcpo.service.model_config import config_problem, load_problem, shape_problem
from vcpo.service.rotary_table import fix_rotary_table
from vcpo.service.vocabulary import keep_vocabulary

_LOGGER = logging.getLogger(__name__)
_MAX_SHOWN = 5
DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
)
"""Number formats of models, by their name in a configuration."""

UNLOADABLE: Final = (OSError, ValueError, SafetensorError, StrictDataclassError)
"""What transformers raises of a model that is not there, is damaged or contradicts itself."""


class ModelLoadError(StartError):
    """A model cannot be loaded; the message names the field, the value and the fix."""

    def __init__(self, name: str, cause: Exception) -> None:
        super().__init__(load_problem(name, cause))


def load_policy(
    name: str,
    revision: str | None,
    lora: Lora | None = None,
    context_tokens: int | None = None,
    *,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the weights (as float32) and the tokenizer from a directory or the hub.

    The model carries its vocabulary. Its `config.dtype` is that of the files, in which an export is
    written.

    context_tokens: longest prompt and response of the run; None for the model's context.
    """
    dtype = check_config(name, revision, trust_remote_code=trust_remote_code)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            revision=revision,
            trust_remote_code=trust_remote_code,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # told below
            output_loading_info=True,
        )
    except UNLOADABLE as error:
        raise ModelLoadError(name, error) from error
    model, found = cast("tuple[PreTrainedModel, dict[str, set[Any]]]", loaded)
    if (problem := shape_problem(name, found["mismatched_keys"])) is not None:
        raise StartError(problem)
    require_finite(name, model)
    account_for(name, model, missing=found["missing_keys"], unused=found["unexpected_keys"])
    model.config.dtype = dtype
    fix_rotary_table(model, context_tokens)
    tokenizer = load_vocabulary(model, name, revision, trust_remote_code=trust_remote_code)
    choose_trained(model, lora)
    return model, tokenizer


def choose_trained(model: PreTrainedModel, lora: Lora | None) -> None:
    """Add the adapters that are trained to a model, in place; None trains all its weights."""
    if lora is None:
        require_all_trained(model)
    else:
        # peft takes seconds to import, and few runs need it.
        from vcpo_learner.model.lora import add_adapters

        add_adapters(model, lora)


def hold_base_short(model: PreTrainedModel, precision: Precision) -> None:
    """Hold frozen parameters in bfloat16 if the model's files do and a run computes in it.

    It changes no digit of them, and takes half of the memory. Parameters that are trained stay
    float32. In place.
    """
    if precision is Precision.BFLOAT16 and model.config.dtype is torch.bfloat16:
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()


def require_all_trained(model: PreTrainedModel) -> None:
    """Check that a run without adapters may train every parameter: versions hold no other."""
    frozen = next((name for name, each in model.named_parameters() if not each.requires_grad), None)
    if frozen is not None:
        raise StartError(
            f"spec.model.name: {type(model).__name__} never trains its parameter {frozen}, and a"
            " run without adapters trains and publishes them all; set `spec.model.lora`, or use"
            " another model"
        )


def check_config(name: str, revision: str | None, *, trust_remote_code: bool) -> torch.dtype:
    """Check by its configuration that a model can be trained; no code of the model runs.

    Returns: the number format of its files; float32 if the configuration has none.
    """
    try:
        config, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    except (OSError, ValueError) as error:
        raise ModelLoadError(name, error) from error
    is_known = config.get("model_type") in CONFIG_MAPPING
    problem = config_problem(config, name, is_known=is_known, trust_remote_code=trust_remote_code)
    if problem is not None:
        raise StartError(str(problem))
    sections = (config, config.get("text_config") or {})
    named = [str(section.get(key)) for section in sections for key in ("dtype", "torch_dtype")]
    return next((DTYPES[each] for each in named if each in DTYPES), torch.float32)


def account_for(
    name: str, model: PreTrainedModel, *, missing: Collection[str], unused: Collection[str]
) -> None:
    """Check that the files of a model hold its parameters; log what else does not fit.

    A buffer that the files do not have keeps the value that the architecture gives it, and is
    published. A tensor that the architecture has no place for is left out on both sides, such as
    layers that predict several tokens.
    """
    parameters = {each for each, _ in model.named_parameters(remove_duplicate=False)}
    if random := sorted(parameters & set(missing)):
        fix = "save the model again with transformers, or fetch its files again"
        if random == ["lm_head.weight"]:
            fix += ", or, if the head is the embeddings, tie_word_embeddings: true in text_config"
        raise StartError(
            f"spec.model.name: the files of '{name}' have no values for {_list_names(random)}; they"
            f" belong to another architecture than its config.json names, or are incomplete: {fix}"
        )
    if initial := sorted(set(missing) - parameters):
        _LOGGER.warning(
            "the files of '%s' do not hold the buffers %s; they have their initial values",
            name,
            _list_names(initial),
        )
    ignored = "|".join(f"({each})" for each in model._keys_to_ignore_on_load_unexpected or ())
    left = sorted(each for each in unused if not ignored or re.search(ignored, each) is None)
    if left:
        _LOGGER.warning(
            "the files of '%s' hold tensors that the model has no place for: %s; they are neither"
            " trained nor sampled with",
            name,
            _list_names(left),
        )


def require_finite(name: str, model: nn.Module) -> None:
    """Check that a model's parameters, of which a rank may hold a part, are numbers."""
    for path, parameter in model.named_parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not bool(own.detach().isfinite().all()):
            found = f"spec.model.name: '{name}' holds NaN or infinity in {path}"
            raise StartError(f"{found}; fetch its files again, or give another model")


def _list_names(names: list[str]) -> str:
    more = len(names) - _MAX_SHOWN
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")


def load_vocabulary(
    model: PreTrainedModel, name: str, revision: str | None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, and make the model carry its vocabulary."""
    tokenizer = load_tokenizer(name, revision, trust_remote_code=trust_remote_code)
    try:
        keep_vocabulary(model, tokenizer)
    except ValueError as error:
        raise ModelLoadError(name, error) from error
    return tokenizer


def load_tokenizer(
    name: str, revision: str | None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer from a directory or the hub."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ModelLoadError(name, error) from error
    return tokenizer


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that pads short rows; any token will do, because padding is masked."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token_id, int):
            return token_id
    return 0
