"""Loads a model's architecture, tokenizer and, if needed, parameters, by its name in the run file.

A rollout worker needs no checkpoint: the learner sends every parameter and persistent buffer before
the first token is sampled. The worker reads only the configuration and leaves the parameters
uninitialized. If the run trains adapters, the learner sends only those, and the worker reads the
base model itself.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from vcpo.api.workloads import Precision
from vcpo.service.model_config import config_problem, load_problem, shape_problem
from vcpo.service.rotary_table import fix_rotary_table
from vcpo.service.vocabulary import keep_vocabulary
from vcpo_rollout.engines.loading_weights import held_tensors

_DTYPES: Final = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}


def torch_dtype(precision: Precision) -> torch.dtype:
    """Return the torch dtype of a precision."""
    return _DTYPES[precision]


def load_model_skeleton(
    name: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    precision: Precision = Precision.FLOAT32,
    context_tokens: int | None = None,
) -> PreTrainedModel:
    """Build a model from its configuration; its parameters are uninitialized.

    It carries its vocabulary, if it has a tokenizer.

    context_tokens: longest prompt and response of the run; None for the model's context.
    """
    _check_config(name, revision, trust_remote_code=trust_remote_code)
    with _explain_errors(name):
        config = AutoConfig.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
        softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        with no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # it has no annotations
                config,
                trust_remote_code=trust_remote_code,
                dtype=torch_dtype(precision),
                # Transformers' sdpa leaves a soft cap of attention scores out.
                attn_implementation=None if softcap is None else "eager",
            )
    # `no_init_weights` also skips the tying of weights.
    model.tie_weights()
    fix_rotary_table(model, context_tokens)
    with suppress(ValueError):  # who encodes text with it refuses the run
        tokenizer = load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)
        keep_vocabulary(model, tokenizer)
    return model


def load_state(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> dict[str, Tensor]:
    """Return a model's float32 parameters and persistent buffers, each under its first name."""
    _check_config(name, revision, trust_remote_code=trust_remote_code)
    with _explain_errors(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            revision=revision,
            trust_remote_code=trust_remote_code,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # told below
            output_loading_info=True,
        )
    model, found = loaded
    if (problem := shape_problem(name, found["mismatched_keys"])) is not None:
        raise ValueError(problem)
    return {key: tensor.detach() for key, tensor in held_tensors(model).items()}


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer."""
    with _explain_errors(name):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
    return tokenizer


def load_end_token_ids(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    turn_end_ids: frozenset[int] = frozenset(),
    *,
    revision: str | None = None,
) -> frozenset[int]:
    """Return the tokens that end a response: of tokenizer, generation config and chat template."""
    configured = None
    with suppress(OSError):
        generation = GenerationConfig.from_pretrained(name, revision=revision or "main")
        configured = generation.eos_token_id
    others = configured if isinstance(configured, list) else [configured]
    end_token_ids = {tokenizer.eos_token_id, *others, *turn_end_ids} - {None}
    if not end_token_ids:
        fix = "set eos_token in its tokenizer_config.json"
        raise ValueError(f"spec.model.name: {name!r} names no end token, so nothing ends; {fix}")
    return frozenset(end_token_ids)


def place_model(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Move the model and cast its parameters; buffers such as rotary frequencies stay float32."""
    try:
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(device, dtype)
    except torch.OutOfMemoryError as error:
        fix = "set a smaller spec.rollouts[].maxReplicas, or spec.rollouts[].precision: bfloat16"
        full = f"{model.name_or_path!r} does not fit on a worker's GPU ({error!s:.120}...)"
        raise ValueError(f"spec.model.name: {full}; {fix}") from error


def _check_config(name: str, revision: str | None, *, trust_remote_code: bool) -> None:
    """Check by its configuration that a model can be sampled from; no code of the model runs."""
    with _explain_errors(name):
        config, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    is_known = config.get("model_type") in CONFIG_MAPPING
    problem = config_problem(config, name, is_known=is_known, trust_remote_code=trust_remote_code)
    if problem is not None:
        raise ValueError(str(problem))


@contextmanager
def _explain_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError, StrictDataclassError) as error:
        raise ValueError(load_problem(name, error)) from error


def in_checkpoint_form(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model in memory under the names and in the shapes of a checkpoint.

    transformers holds all experts of a layer in one tensor, and renames some modules.

    model: may be without parameters.
    tensors: by the names that the model has for them; of a decoder layer all or none.
    """
    if not get_model_conversion_mapping(model, add_legacy=False):
        return dict(tensors)
    saved: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return saved
