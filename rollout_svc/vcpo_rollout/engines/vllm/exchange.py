"""What goes into vLLM and comes out of it, in its terms and in ours."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import IO

import safetensors.torch
from torch import Tensor
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import layerwise_groups
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from vcpo.wire.trajectory import FinishReason, PartialResponse, VersionSpan
from vcpo_rollout.engines.engine import (
    EngineError,
    Generation,
    GenerationInterruptedError,
    GenerationRequest,
)

_ABORTED = "abort"
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def sampling_params(request: GenerationRequest, end_token_ids: frozenset[int]) -> SamplingParams:
    """How to sample a request: from the whole vocabulary, until one of our end tokens."""
    num_sampled = 0 if request.partial_response is None else len(request.partial_response.token_ids)
    return SamplingParams(
        temperature=request.temperature,
        max_tokens=request.max_new_tokens - num_sampled,
        logprobs=0,  # of the sampled token, and of no other
        ignore_eos=True,  # vLLM's idea of the end token; ours is the next line
        stop_token_ids=sorted(end_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def to_generation(
    output: CompletionOutput | None, partial_response: PartialResponse | None
) -> Generation:
    """A finished sequence in our terms, behind what was partial_response of it elsewhere.

    Raises:
        GenerationInterruptedError: with what there is, when the sequence was aborted.
        EngineError: when vLLM gave the sequence up, or the model's logits are not numbers.
    """
    if output is None or output.finish_reason not in {*_FINISH_REASONS, _ABORTED}:
        raise EngineError("vLLM gave the sequence up; its log says why")
    reason = _FINISH_REASONS.get(output.finish_reason)
    if not output.token_ids:
        raise GenerationInterruptedError(partial_response)
    sampled = _sampled(output)
    whole = sampled if partial_response is None else _joined(partial_response, sampled)
    if reason is None:
        raise GenerationInterruptedError(whole)
    return Generation(
        token_ids=whole.token_ids,
        logprobs=whole.logprobs,
        version_spans=whole.version_spans,
        finish_reason=reason,
    )


def _sampled(output: CompletionOutput) -> PartialResponse:
    logprobs = tuple(
        float(at[token_id].logprob)
        for at, token_id in zip(output.logprobs, output.token_ids, strict=True)
    )
    if not all(map(math.isfinite, logprobs)):
        raise EngineError(
            f"policy version {output.weight_versions[-1].version} gives logits that are not "
            "finite; look at the learner's last steps"
        )
    spans = tuple(
        VersionSpan(policy_version=int(span.version), num_tokens=span.end - span.start)
        for span in output.weight_versions
    )
    return PartialResponse(
        token_ids=tuple(output.token_ids), logprobs=logprobs, version_spans=spans
    )


def _joined(partial_response: PartialResponse, rest: PartialResponse) -> PartialResponse:
    return PartialResponse(
        token_ids=partial_response.token_ids + rest.token_ids,
        logprobs=partial_response.logprobs + rest.logprobs,
        version_spans=partial_response.version_spans + rest.version_spans,
    )


def tensors_to_send(
    tensors: Mapping[str, Tensor], changed: frozenset[str] | None
) -> dict[str, Tensor]:
    """The tensors that vLLM has to load: of each decoder layer all, if one of them changed.

    vLLM stores some tensors of a decoder layer as one (q, k and v; gate and up; all experts). A
    reload leaves alone what it gets no part of, and makes anew what it gets a part of, the missing
    rest without values. Which go together depends on the architecture; none crosses the border of a
    decoder layer, nor that of what stands before the first and behind the last.

    changed: None sends all.
    """
    if changed is None:
        return dict(tensors)
    groups = layerwise_groups(list(tensors))
    touched = [group for group in groups if not changed.isdisjoint(group)]
    return {name: tensors[name] for group in touched for name in group}


def write_memory_file(tensors: dict[str, Tensor]) -> IO[bytes]:
    """Write tensors as a safetensors file that is in memory only, and gone when it is closed.

    Its kind has no name to clean up after a kill, and no limit such as that of a container's
    /dev/shm; another process of the same user opens it under /proc.
    """
    file = os.fdopen(os.memfd_create("vcpo-weights"), "wb")
    file.write(safetensors.torch.save(tensors))
    file.flush()
    return file
