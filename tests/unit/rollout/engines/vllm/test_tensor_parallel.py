"""A model split over two processes of a real vLLM, each of which takes its slice of a version."""

import asyncio

import pytest
import pytest_asyncio

from tests.unit.rollout.engines.vllm.scoring import assert_scored_by_its_versions
from tests.unit.rollout.engines.vllm.tiny_adapters import (
    LORA,
    adapted,
    make_adapters,
    version_of,
)
from tests.unit.rollout.engines.vllm.tiny_vllm import build, start

PROMPT = (5, 6, 7)
NUM_PROCESSES = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory):
    engine = await start(tmp_path_factory.mktemp("split"), tensor_parallel_size=NUM_PROCESSES)
    yield engine
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
class TestSplitModel:
    async def test_every_token_is_scored_by_the_version_that_its_span_names(
        self, engine, make_request, publish, reference_logprobs
    ):
        models = {number: build(seed=number) for number in (11, 12, 13)}
        await engine.swap_weights(publish(models[11], 11))
        requests = [
            make_request(PROMPT, max_new_tokens=100, temperature=temperature)
            for temperature in (1.0, 0.7)
            for _ in range(3)
        ]
        generating = [asyncio.create_task(engine.generate(request)) for request in requests]
        taken_over = [
            await engine.swap_weights(publish(models[number], number)) for number in (12, 13)
        ]
        for generation, request in zip(await asyncio.gather(*generating), requests, strict=True):
            assert_scored_by_its_versions(generation, request, models, reference_logprobs)
        assert max(taken_over) > 0


@pytest.mark.asyncio
async def test_each_process_takes_its_slice_of_adapters(tmp_path, make_request, reference_logprobs):
    base = build(seed=1)
    base.save_pretrained(tmp_path)
    engine = await start(tmp_path, lora=LORA, tensor_parallel_size=NUM_PROCESSES)
    request = make_request(PROMPT, max_new_tokens=40)
    for version in (1, 2):
        tensors = make_adapters(base, seed=version)
        await engine.swap_weights(version_of(tensors, version))
        generation = await engine.generate(request)
        models = {version: adapted(base, tensors)}
        assert_scored_by_its_versions(generation, request, models, reference_logprobs)
    await engine.close()
