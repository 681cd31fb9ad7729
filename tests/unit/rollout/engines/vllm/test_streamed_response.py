"""What a stop string leaves of what vLLM sampled."""

import numpy as np
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, WeightVersionSpan

from tests.fixtures.rollout.tokenizers import PIECES, pieces
from vcpo.wire.trajectory import FinishReason, PartialResponse, VersionSpan
from vcpo_rollout.engines.engine import GenerationRequest
from vcpo_rollout.engines.stop_strings import StopStrings
from vcpo_rollout.engines.vllm.exchange import to_generation
from vcpo_rollout.engines.vllm.streamed_response import StreamedResponse

PROMPT = (5, 6, 7)


def output_of(*token_ids, **last):
    return CompletionOutput(
        index=0,
        text="",
        token_ids=list(token_ids),
        cumulative_logprob=None,
        logprobs=[{token_id: Logprob(-float(token_id))} for token_id in token_ids],
        **last,
    )


def test_what_vllm_sampled_after_the_string_is_no_part_of_the_response():
    request = GenerationRequest(
        prompt_token_ids=PROMPT,
        temperature=1.0,
        max_new_tokens=9,
        partial_response=PartialResponse(
            token_ids=(8, 9),
            logprobs=(-1.0, -2.0),
            version_spans=(VersionSpan(policy_version=1, num_tokens=2),),
        ),
    )
    streamed = StreamedResponse(StopStrings(pieces(), ["ns"]), request)
    streamed.add(output_of(10))
    n, s = PIECES.index("n"), PIECES.index("s")
    streamed.add(output_of(n, s, 11))
    assert streamed.is_stopped
    # 3 tokens of the prompt, 2 resumed, 5 sampled; the last one is not read.
    routes = np.arange(9, dtype=np.uint8).reshape(9, 1, 1)
    last = output_of(
        12,
        finish_reason="abort",
        routed_experts=routes,
        weight_versions=[
            WeightVersionSpan("4", 0, 1),
            WeightVersionSpan("5", 1, 4),
            WeightVersionSpan("6", 4, 5),
        ],
    )
    streamed.add(last)
    generation = to_generation(streamed.whole(last), request.partial_response)
    assert generation.token_ids == (8, 9, 10, n, s)
    assert generation.logprobs == (-1.0, -2.0, -10.0, -float(n), -float(s))
    assert generation.version_spans == tuple(
        VersionSpan(policy_version=version, num_tokens=size)
        for version, size in ((1, 2), (4, 1), (5, 2))
    )
    assert generation.finish_reason is FinishReason.STOP
    assert generation.expert_routes.experts == bytes(range(7))


def test_a_response_without_a_string_is_what_vllm_returned():
    request = GenerationRequest(prompt_token_ids=PROMPT, temperature=1.0, max_new_tokens=2)
    streamed = StreamedResponse(StopStrings(pieces(), ["ns"]), request)
    streamed.add(output_of(10))
    last = output_of(11, finish_reason="length", weight_versions=[WeightVersionSpan("4", 0, 2)])
    streamed.add(last)
    generation = to_generation(streamed.whole(last), None)
    assert (generation.token_ids, generation.logprobs) == ((10, 11), (-10.0, -11.0))
    assert generation.finish_reason is FinishReason.LENGTH
