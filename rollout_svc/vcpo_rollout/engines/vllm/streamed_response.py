"""A response that a stop string may end: read while vLLM samples it, and cut where it ends.

vLLM looks for stop strings itself (`SamplingParams.stop`), but only in the text of the tokens that
it samples: what another worker sampled is a part of the prompt to it. It also waits for the next
token if one ends in the middle of a character. So this engine finds them as the `hf` engine does.

vLLM labels tokens in the last output of a request only. So the request is aborted by its name once
a string is complete, which makes vLLM return that output at once. It may have sampled some tokens
more by then; they are dropped, as vLLM drops them after a stop string of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.outputs import CompletionOutput

from vcpo_rollout.engines.engine import GenerationRequest
from vcpo_rollout.engines.stop_strings import StopStrings


class StreamedResponse:
    """The tokens of one request so far, from outputs with the new tokens of each."""

    def __init__(self, stop_strings: StopStrings, request: GenerationRequest) -> None:
        partial_response = request.partial_response
        resumed = () if partial_response is None else partial_response.token_ids
        self._stop_strings = stop_strings
        self._num_before = len(request.prompt_token_ids) + len(resumed)
        self._num_resumed = len(resumed)
        self._token_ids = list(resumed)
        self._logprobs: list[Any] = []
        self.is_stopped = False
        """Whether a stop string is complete; later tokens are not part of the response."""

    def add(self, output: CompletionOutput) -> None:
        """Append the tokens of an output, to the one that completes a stop string."""
        self._logprobs += output.logprobs or []
        for token_id in output.token_ids:
            if not self.is_stopped:
                self._token_ids.append(token_id)
                self.is_stopped = self._stop_strings.completed_by_last(self._token_ids)

    def whole(self, last: CompletionOutput) -> CompletionOutput:
        """Return the last output with all tokens of the response that vLLM sampled."""
        token_ids: Sequence[int] = self._token_ids[self._num_resumed :]
        size = len(token_ids)
        output = replace(last, token_ids=token_ids, logprobs=self._logprobs[:size])
        if not self.is_stopped:
            return output
        routes = output.routed_experts
        return replace(
            output,
            finish_reason="stop",
            weight_versions=[
                replace(span, end=min(span.end, size))
                for span in output.weight_versions or ()
                if span.start < size
            ],
            # The model has not read the last token.
            routed_experts=None if routes is None else routes[: self._num_before + size - 1],
        )
