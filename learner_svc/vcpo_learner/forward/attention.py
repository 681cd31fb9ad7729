"""Attention within trajectories: no mask of tokens times tokens is ever built.

Attention is causal, so a trajectory needs no mask if nothing stands before it: a row with padding
on its right is one such trajectory, and of packed rows each trajectory is computed by itself. On a
GPU one kernel takes all of them at once (`torch.nn.attention.varlen`); elsewhere they follow each
other. A sliding window, and a soft cap of the scores, go by blocks of queries.

Transformers' models call it by the name in their configuration; a name for which no mask function
is registered gets no mask (`transformers.masking_utils`).
"""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vcpo.api.learner import Attention
from vcpo.service.lifecycle import StartError

NAME = "vcpo_varlen"
"""Name of this attention in a model's configuration."""

_QUERY_BLOCK = 256
"""Queries whose scores are in memory at a time, where scores are computed one by one."""
_LARGEST_HEAD = 256
"""Numbers per head that the GPU's kernel takes."""
_SHORT_ROW = 256
"""Tokens up to which a CPU's kernel is 1.5 to 4 times as fast in float32 as in bfloat16."""
_calls: Counter[str] = Counter()
"""Calls of this attention since `take_calls`, by the way that each took. Owner: the tensor thread;
a backward pass that computes layers again counts from the thread of its device."""


def select_attention(
    model: nn.Module, attention: Attention, *, packs: bool, is_half: bool = False
) -> bool:
    """Let a model compute attention as a run wants it; return whether it is `varlen`.

    model: one of transformers' models, or a module around one; any other stays as it is.
    packs: whether rows hold several trajectories, which only `varlen` keeps apart.
    is_half: whether products are in bfloat16, in which short rows are slow on a CPU with `sdpa`.
    Raises: StartError, naming the field and the fix, if the model cannot.
    """
    policy = transformers_model(model)
    refusal = "it is not a transformers model" if policy is None else _refusal(policy)
    if packs and (refusal is not None or attention is Attention.SDPA):
        reason = refusal or "learner.attention is sdpa, which does not keep trajectories apart"
        raise StartError(f"spec.batch.rowLayout: packed, but {reason}; use padded")
    if policy is None:
        return False
    config = policy.config.get_text_config()
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    if attention is Attention.VARLEN and refusal is not None:
        raise StartError(f"spec.learner.attention: varlen, but {refusal}; use auto")
    if attention is Attention.SDPA and is_capped:
        raise StartError(
            f"spec.learner.attention: sdpa leaves out the soft cap that {type(policy).__name__}"
            " puts on attention scores; use auto"
        )
    is_wanted = attention is Attention.VARLEN or (
        attention is Attention.AUTO
        and (packs or is_capped or (is_half and policy.device.type == "cpu"))
    )
    if not is_wanted or refusal is not None:
        return False
    ALL_ATTENTION_FUNCTIONS.register(NAME, varlen_attention)
    policy.set_attn_implementation(NAME)
    return True


def transformers_model(model: nn.Module) -> PreTrainedModel | None:
    """Return the outermost of transformers' models in a module."""
    return next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)


def has_kernel(model: PreTrainedModel) -> bool:
    """Return whether the model's device may have a kernel that takes all of a packed row."""
    return model.device.type == "cuda"


def take_calls() -> dict[str, int]:
    """Return how often each way of this attention ran since the last time, and begin anew.

    kernel: one kernel for all trajectories of a row; one_by_one: a call for each trajectory;
    rows: one trajectory to a row. Empty if a model has an attention of its own.
    """
    found = dict(_calls)
    _calls.clear()
    return found


def _refusal(model: PreTrainedModel) -> str | None:
    """Why a model's attention is not one of this module, or None."""
    name = type(model).__name__
    # Transformers' own word for models whose masks follow from what they pass to the attention.
    if not (model._supports_flash_attn and model._can_set_attn_implementation()):
        return f"{name} gives its attention a mask of its own"
    if any(key.endswith("sinks") for key, _ in model.named_parameters()):
        return f"{name} has attention sinks"
    if not _tells_window(model):
        return f"{name} puts its sliding window into a mask only"
    return None


def _tells_window(model: PreTrainedModel) -> bool:
    """Return whether a model's attention is told its sliding window, if it has one.

    In a few families of transformers only the mask has it, and without a mask it is left out.
    """
    config = model.config.get_text_config()
    kinds_of_layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    window = getattr(config, "sliding_window", None)
    if window is None or "sliding_attention" not in kinds_of_layers:
        return True
    kinds = {type(module) for module in model.modules() if hasattr(module, "is_causal")}
    return any("sliding_window" in inspect.getsource(kind.forward) for kind in kinds)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return causal attention within each trajectory, [rows, tokens, heads, size], contiguous.

    query: [rows, heads, tokens, size]. key, value: the same with as many heads, or a divisor.
    sliding_window: most tokens that a token sees, itself included.
    softcap: c in c tanh(score / c).
    cu_seq_lens_q: [n + 1] int32, the end of each trajectory in one row, after a 0; None for one
        trajectory to a row.
    max_length_q: tokens of the longest trajectory; given with `cu_seq_lens_q`.
    Raises: ValueError for what it does not compute.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None or s_aux is not None or dropout or not causal:
        raise ValueError(
            f"{type(module).__name__} wants a mask, sinks, dropout or attention that is not causal:"
            " attention 'varlen' has none; use 'sdpa'"
        )
    # Autocast leaves rotated queries and keys in float32, and would cast them for each product; the
    # kernel takes one type.
    query, key = query.to(value.dtype), key.to(value.dtype)
    scoring = _Scoring(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    if cu_seq_lens_q is None or max_length_q is None:
        _calls["rows"] += 1
        return _causal(query, key, value, scoring).transpose(1, 2).contiguous(), None
    if scoring.softcap is None and _fits_kernel(query, value):
        _calls["kernel"] += 1
        flat = [each[0].transpose(0, 1) for each in (query, key, value)]
        return _by_kernel(flat, cu_seq_lens_q, max_length_q, scoring)[None], None
    _calls["one_by_one"] += 1
    lengths = cu_seq_lens_q.diff().tolist()
    queries, keys, values = (torch.split(each, lengths, dim=2) for each in (query, key, value))
    parts = [_causal(*each, scoring) for each in zip(queries, keys, values, strict=True)]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scoring:
    """How scores follow from queries and keys."""

    scale: float
    window: int | None
    softcap: float | None


def _fits_kernel(query: Tensor, value: Tensor) -> bool:
    size = query.shape[-1]
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_half and size == value.shape[-1] and size <= _LARGEST_HEAD


def _by_kernel(flat: Sequence[Tensor], ends: Tensor, longest: int, scoring: _Scoring) -> Tensor:
    """Attention within each trajectory in one kernel, [tokens, heads, size].

    flat: query, key and value in this shape; ends: [n + 1] int32.
    """
    query, key, value = flat
    found = varlen_attn(
        query,
        key,
        value,
        ends,
        ends,
        longest,
        longest,
        scale=scoring.scale,
        window_size=(-1 if scoring.window is None else scoring.window - 1, 0),
        **_group_argument(varlen_attn, query.shape[1] != key.shape[1]),
    )
    # With its logarithms only on request.
    return found if isinstance(found, Tensor) else found[0]


@cache
def _group_argument(kernel: Callable[..., Any], is_grouped: bool) -> dict[str, Any]:
    takes_argument = "enable_gqa" in inspect.signature(kernel).parameters
    return {"enable_gqa": is_grouped} if takes_argument else {}


def _causal(query: Tensor, key: Tensor, value: Tensor, scoring: _Scoring) -> Tensor:
    """Causal attention within each row, [rows, heads, tokens, size]."""
    num_tokens, num_repeats = query.shape[2], query.shape[1] // key.shape[1]
    if num_repeats > 1:
        # The fast kernels of every device and number type take equal numbers of heads.
        key, value = (each.repeat_interleave(num_repeats, dim=1) for each in (key, value))
    window = scoring.window
    if scoring.softcap is None and (window is None or num_tokens <= window):
        is_half, is_short = query.dtype is torch.bfloat16, num_tokens <= _SHORT_ROW
        if is_half and is_short and query.device.type == "cpu":
            with torch.autocast("cpu", enabled=False):
                found = _causal(query.float(), key.float(), value.float(), scoring)
            return found.to(value.dtype)
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scoring.scale
        )
    blocks = []
    for start in range(0, num_tokens, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, num_tokens)
        first = 0 if window is None else max(0, start - window + 1)
        seen = _visible_keys(start, end, first, window, query.device)
        block = query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], seen, scoring
        # Computed again in the backward pass: all scores at once are tokens times tokens.
        blocks.append(checkpoint(_attend_block, *block, use_reentrant=False))
    return torch.cat(blocks, dim=2)


def _visible_keys(
    start: int, end: int, first: int, window: int | None, device: torch.device
) -> Tensor:
    """Which of the keys first..end the queries start..end see, [queries, keys] bool."""
    queries = torch.arange(start, end, device=device)[:, None]
    keys = torch.arange(first, end, device=device)
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scoring: _Scoring
) -> Tensor:
    """Attention of a block of queries; seen: [queries, keys] bool."""
    if scoring.softcap is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scoring.scale
        )
    scores = scoring.softcap * torch.tanh(query @ key.mT * (scoring.scale / scoring.softcap))
    hidden = scores.masked_fill(~seen, -torch.inf)
    precise = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.softmax(dim=-1, dtype=precise).to(value.dtype) @ value
