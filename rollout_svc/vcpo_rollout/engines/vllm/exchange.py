"""Converts requests, outputs and weights between this package's types and vLLM's."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Final

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind

from vcpo.wire.deltas import VALUES, Positions
from vcpo.wire.limits import MAX_ROUTE_BYTES
from vcpo.wire.packing import ExpertRoutes
from vcpo.wire.trajectory import FinishReason, PartialResponse, VersionSpan
from vcpo_rollout.engines.engine import (
    EngineError,
    Generation,
    GenerationInterruptedError,
    GenerationRequest,
    NonFiniteLogitsError,
)
from vcpo_rollout.engines.loading_weights import write_tensors
from vcpo_rollout.engines.seeds import token_seed

POSITIONS: Final = ":positions"
"""Suffix of the entry with the positions of a tensor's changes; its values have `VALUES`."""
_ABORTED = "abort"
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def sampling_params(
    request: GenerationRequest, end_token_ids: frozenset[int], stop_strings: Sequence[str] = ()
) -> SamplingParams:
    """Return vLLM's parameters: all tokens of the vocabulary, until one of `end_token_ids`.

    stop_strings: that end it too; vLLM must have the tokenizer for them.

    vLLM seeds a request once, so a resumed response goes on with other numbers than its first part
    would have; one that begins again gets the same.
    """
    num_sampled = 0 if request.partial_response is None else len(request.partial_response.token_ids)
    seed = request.seed
    if seed is not None:
        seed = token_seed(seed, len(request.prompt_token_ids) + num_sampled)
    return SamplingParams(
        temperature=request.temperature,
        seed=seed,
        max_tokens=request.max_new_tokens - num_sampled,
        logprobs=0,  # of the sampled token only
        ignore_eos=True,  # the end tokens are those of the next line
        stop_token_ids=sorted(end_token_ids),
        stop=list(stop_strings),
        include_stop_str_in_output=True,
        skip_special_tokens=False,  # a string may name one
        detokenize=bool(stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def to_generation(
    output: CompletionOutput | None,
    partial_response: PartialResponse | None,
    *,
    keys_version: int | None = None,
) -> Generation:
    """Return a finished sequence: the tokens of `partial_response`, then those of `output`.

    keys_version: oldest version of keys and values that `output` may have read at its beginning;
        None if each version computed its own.

    Raises:
        GenerationInterruptedError: with the tokens so far, when the sequence was aborted.
        EngineError: when vLLM dropped the sequence, or the model's logits are not finite.
    """
    if output is None or output.finish_reason not in {*_FINISH_REASONS, _ABORTED}:
        raise EngineError("vLLM dropped the sequence; its log says why")
    reason = _FINISH_REASONS.get(output.finish_reason)
    if not output.token_ids:
        raise GenerationInterruptedError(partial_response)
    sampled = _to_partial_response(output, keys_version)
    whole = sampled
    if partial_response is not None:
        whole = PartialResponse(
            token_ids=partial_response.token_ids + sampled.token_ids,
            logprobs=partial_response.logprobs + sampled.logprobs,
            version_spans=partial_response.version_spans + sampled.version_spans,
        )
    if reason is None:
        raise GenerationInterruptedError(whole)
    return Generation(
        token_ids=whole.token_ids,
        logprobs=whole.logprobs,
        version_spans=whole.version_spans,
        finish_reason=reason,
        expert_routes=_to_expert_routes(output),
    )


def _to_expert_routes(output: CompletionOutput) -> ExpertRoutes | None:
    """Return what vLLM's routers chose for the first tokens, as many as fit a message."""
    routes = output.routed_experts  # [tokens, decoder layers, choices]
    if routes is None or not routes.nbytes:
        return None
    routes = routes[: MAX_ROUTE_BYTES // routes[0].nbytes]
    _, num_layers, num_choices = routes.shape
    return ExpertRoutes(
        experts=routes.tobytes(),
        num_layers=num_layers,
        num_choices=num_choices,
        is_wide=routes.itemsize > 1,
    )


def _to_partial_response(output: CompletionOutput, keys_version: int | None) -> PartialResponse:
    logprobs = tuple(
        float(at[token_id].logprob)
        for at, token_id in zip(output.logprobs, output.token_ids, strict=True)
    )
    if not all(map(math.isfinite, logprobs)):
        raise NonFiniteLogitsError(
            f"policy version {output.weight_versions[-1].version} gives logits that are not "
            "finite; look at the learner's last steps"
        )
    return PartialResponse(
        token_ids=tuple(output.token_ids),
        logprobs=logprobs,
        version_spans=tuple(_label_spans(output.weight_versions, keys_version)),
    )


def _label_spans(
    sampled: Iterable[WeightVersionSpan], keys_version: int | None
) -> Iterator[VersionSpan]:
    """Yield spans with the age of the keys that they may have read; as `to_generation`."""
    for span in sampled:
        version, age = int(span.version), 0
        if keys_version is not None:
            # A version that is no later one clears what was there.
            keys_version = min(keys_version, version)
            age = version - keys_version
        yield VersionSpan(
            policy_version=version, num_tokens=span.end - span.start, key_age_versions=age
        )


def patches_to_send(
    tensors: Mapping[str, Tensor], changed: Mapping[str, Positions]
) -> dict[str, Tensor] | None:
    """Return positions and new values of the changed elements, as two tensors for each name.

    Returns: None if vLLM takes no such patch: it marks the elements that stay by NaN.
    """
    patches: dict[str, Tensor] = {}
    for name, positions in changed.items():
        is_narrow = tensors[name].numel() <= np.iinfo(np.int32).max
        at = torch.from_numpy(positions.astype(np.int32 if is_narrow else np.int64))
        values = tensors[name].view(-1)[at]
        if not values.is_floating_point() or values.isnan().any():
            return None
        patches |= {name + POSITIONS: at, name + VALUES: values}
    return patches


def write_memory_file(tensors: Mapping[str, Tensor]) -> IO[bytes]:
    """Write tensors to a safetensors file in memory, which vanishes when it is closed.

    Such a file (memfd) leaves no name to clean up after a kill, and has no size limit such as a
    container's /dev/shm has. Another process of the same user opens it under /proc.
    """
    file = os.fdopen(os.memfd_create("vcpo-weights"), "wb")
    write_tensors(tensors, file)
    file.flush()
    return file
