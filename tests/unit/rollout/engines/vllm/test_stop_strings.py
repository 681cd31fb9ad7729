"""Responses that a stop string ends, on a real vLLM: ends, labels and numbers are those of `hf`."""

import asyncio

import numpy as np
import pytest
import pytest_asyncio
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, WeightVersionSpan

from tests.fixtures.rollout.tokenizers import PIECES, pieces
from tests.unit.rollout.engines.vllm.scoring import assert_scored_by_its_versions
from tests.unit.rollout.engines.vllm.tiny_vllm import build, start
from vcpo.wire.trajectory import FinishReason, PartialResponse, VersionSpan
from vcpo_rollout.engines.engine import GenerationInterruptedError, GenerationRequest
from vcpo_rollout.engines.stop_strings import StopStrings
from vcpo_rollout.engines.vllm.exchange import to_generation
from vcpo_rollout.engines.vllm.streamed_response import StreamedResponse

PROMPT = (5, 6, 7)
END = 3
STRINGS = ("<answerb", "<answerc", "<answerd", "<answere", "rsw", "ra", "e<", ">a", "/x", "b/")
"""Some end in the middle of a piece; all may begin in one and end in another."""
PATIENCE_S = 120.0


def end_of(token_ids):
    """Where a response ends, and how, by the definition of stop strings; None if it does not."""
    for size, token_id in enumerate(token_ids, start=1):
        text = pieces().decode(list(token_ids[:size]), skip_special_tokens=False)
        if token_id == END or any(string in text for string in STRINGS):
            return size
    return None


def assert_ends_as_defined(generation, limit):
    end = end_of(generation.token_ids)
    assert len(generation.token_ids) == (end or limit)
    assert generation.finish_reason is (FinishReason.STOP if end else FinishReason.LENGTH)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory):
    engine = await start(
        tmp_path_factory.mktemp("stops"), stop_strings=StopStrings(pieces(), STRINGS)
    )
    yield engine
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
class TestEngine:
    async def test_a_string_ends_a_response_at_its_token_whatever_is_swapped_in(
        self, engine, make_request, publish, reference_logprobs
    ):
        models = {number: build(seed=number) for number in (1, 2, 3)}
        await engine.swap_weights(publish(models[1], 1))
        request = make_request(PROMPT, max_new_tokens=40)
        generating = [asyncio.create_task(engine.generate(request)) for _ in range(40)]
        for number in (2, 3):
            await engine.swap_weights(publish(models[number], number))
        generations = await asyncio.gather(*generating)
        for generation in generations:
            assert_ends_as_defined(generation, 40)
            assert_scored_by_its_versions(generation, request, models, reference_logprobs)
        by_string = [each for each in generations if each.token_ids[-1] != END]
        assert FinishReason.STOP in {each.finish_reason for each in by_string}

    async def test_a_string_that_another_worker_began_ends_the_response(
        self, engine, make_request, publish
    ):
        await engine.swap_weights(publish(build(seed=4), 4))
        partial = PartialResponse(
            token_ids=(PIECES.index("x"), PIECES.index("<"), PIECES.index("answer")),
            logprobs=(-0.5, -0.25, -1.0),
            version_spans=(VersionSpan(policy_version=2, num_tokens=3),),
        )
        request = make_request(PROMPT, max_new_tokens=4, partial_response=partial)
        generations = await asyncio.gather(*(engine.generate(request) for _ in range(100)))
        for generation in generations:
            assert generation.token_ids[:3] == partial.token_ids
            assert generation.logprobs[:3] == partial.logprobs
            assert_ends_as_defined(generation, 4)
        letters = {PIECES.index(letter) for letter in "bcde"}
        assert letters & {each.token_ids[3] for each in generations}

    async def test_an_interrupt_leaves_the_tokens_before_any_string(
        self, engine, make_request, publish
    ):
        await engine.swap_weights(publish(build(seed=5), 5))
        interrupt, request = asyncio.Event(), make_request(PROMPT, max_new_tokens=30_000)
        generating = [
            asyncio.create_task(engine.generate(request, interrupt=interrupt)) for _ in range(20)
        ]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait(generating, return_when=asyncio.FIRST_COMPLETED)
            interrupt.set()
            ends = await asyncio.gather(*generating, return_exceptions=True)
        for end in ends:
            if isinstance(end, GenerationInterruptedError):
                partial = end.partial_response
                assert partial is None or end_of(partial.token_ids) is None
            else:
                assert_ends_as_defined(end, 30_000)


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
