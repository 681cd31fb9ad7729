"""One table of rotary frequencies for a run, of the length of its context.

Two kinds of rotary embedding take their frequencies from the longest position of a pass. LongRoPE
has short factors, and long ones for a pass that goes beyond the length of pretraining; dynamic NTK
stretches its frequencies with the pass. A token's numbers would then depend on what is computed
beside it, and cached keys would keep frequencies that the next token no longer has. So each pass
is shown to reach the end of the context, on both sides. vLLM chooses the factors of LongRoPE by the
same rule, from `max_model_len` (its `Phi3LongRoPEScaledRotaryEmbedding`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from vcpo.api import VCPORunSpec
from vcpo.api.errors import FieldProblem
from vcpo.api.workloads import EngineName

if TYPE_CHECKING:  # the core never loads it
    from torch import Tensor, nn

_LOGGER = logging.getLogger(__name__)
_OF_A_PASS: Final = ("longrope", "dynamic")
"""Names of the kinds in `rope_type`; transformers' `dynamic_rope_update` has no others."""


def table_length(config: Any, context_tokens: int | None = None) -> int | None:
    """Return the tokens for which a model's rotary table is made, or None if it is of any length.

    config: a model's configuration in transformers.
    context_tokens: of the run, prompt and response; None for as many as the model has.
    """
    text = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    if not any(each.get("rope_type") in _OF_A_PASS for each in (parameters, *nested)):
        return None
    length: int = text.max_position_embeddings
    return length if context_tokens is None else min(length, context_tokens)


def fix_rotary_table(model: nn.Module, context_tokens: int | None = None) -> None:
    """Let each pass of a model have the rotary frequencies of the run's context.

    The configuration stays as it is. context_tokens: as in `table_length`.
    """
    length = table_length(model.config, context_tokens)
    if length is None:
        return
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if not set(_OF_A_PASS).isdisjoint(kinds.values() if isinstance(kinds, dict) else [kinds]):
            module.register_forward_pre_hook(partial(_reach, length - 1), with_kwargs=True)
            module.register_forward_hook(_without_last)
    _LOGGER.info(
        "rotary frequencies are those of %d tokens, however long a pass is;"
        " spec.rollouts[].maxModelLen of all groups sets another length",
        length,
    )


def table_problems(spec: VCPORunSpec, config: Mapping[str, Any]) -> Iterator[FieldProblem]:
    """Yield a problem for each rollout group whose vLLM would take other factors than the learner.

    config: content of the model's `config.json`.
    """
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    original = text.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings"
    )
    is_longrope = rope.get("rope_type", rope.get("type")) in {"longrope", "su"}
    if not is_longrope or original is None:
        return
    longest = spec.context_tokens or text.get("max_position_embeddings", original)
    for index, group in enumerate(spec.rollouts):
        own = group.max_model_len
        if group.engine_name == EngineName.VLLM and own is not None and own <= original < longest:
            yield FieldProblem(
                path=f"spec.rollouts[{index}].maxModelLen",
                value=str(own),
                message=(
                    f"takes the short factors of this model's LongRoPE, and the run's longest"
                    f" context ({longest}) its long ones; give every group at most {original}"
                    " tokens, or this one more"
                ),
            )


def _reach(
    last: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Append the position `last` to the positions of a call, [..., tokens]."""
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": _append_rows(kwargs["position_ids"], last)}
    states, positions, *others = args
    return (states, _append_rows(positions, last), *others), kwargs


def _append_rows(positions: Tensor, last: int) -> Tensor:
    extended = positions.new_full((*positions.shape[:-1], positions.shape[-1] + 1), last)
    extended[..., :-1] = positions
    return extended


def _without_last(
    _: nn.Module, _args: tuple[Any, ...], tables: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return tuple(each[..., :-1, :] for each in tables)
