"""The engine on a real vLLM: log-probabilities of its tokens, weight swaps and its end."""

import asyncio
from dataclasses import replace

import pytest
import pytest_asyncio
import torch
from prometheus_client import REGISTRY

from tests.fixtures.rollout.models import request_for, weights_of
from tests.fixtures.vocabularies import tokenizer_of
from tests.unit.rollout.engines.vllm.scoring import (
    assert_scored_by_its_versions,
    assert_scored_with_kept_keys,
)
from tests.unit.rollout.engines.vllm.tiny_vllm import NUM_PLACES, build, save_settings
from vcpo.api.workloads import KvCache
from vcpo.wire.trajectory import FinishReason
from vcpo_rollout.engines.engine import EngineError, GenerationInterruptedError
from vcpo_rollout.engines.stop_strings import StopStrings
from vcpo_rollout.engines.vllm.engine import VllmEngine
from vcpo_rollout.engines.vllm.start import load_skeleton, start_llm

PROMPT = (5, 6, 7)
END = 3
LONG_PROMPT = tuple(range(32)) * 6
"""Longer than a block of keys and values (128 tokens), so that its beginning is cached."""
ENDLESS = 30_000
"""More tokens than a test lives to see."""
PATIENCE_S = 120.0
WORDS = tokenizer_of([*range(11), *range(13, 32)])
"""Of the 40 rows, 11, 12 and those from 32 on have no token."""
STRINGS = ("w5 w1", "8 w2", "w27")
"""Some end in the middle of a token; two begin in one and end in another."""


async def start_engines(settings, *others):
    """Engines that take turns with one vLLM: one as it is, and others of these settings."""
    llm = await asyncio.to_thread(start_llm, settings)
    return [
        VllmEngine(
            llm, skeleton=load_skeleton(settings), end_token_ids=frozenset({END}), **arguments
        )
        for arguments in ({}, *others)
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory):
    """One that recomputes keys and values, and one that keeps them."""
    settings = save_settings(tmp_path_factory.mktemp("untied"))
    engines = await start_engines(settings, {"kv_cache": KvCache.KEEP})
    yield engines
    for engine in engines:
        await engine.close()


@pytest.fixture(scope="module")
def engine(engines):
    return engines[0]


@pytest.fixture(scope="module")
def keeping_engine(engines):
    return engines[1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tied_engines(tmp_path_factory):
    """One without stop strings, and one with them, of models that tie their head."""
    settings = save_settings(
        tmp_path_factory.mktemp("tied"), tied=True, tokenizer=WORDS, finds_stop_strings=True
    )
    engines = await start_engines(settings, {"stop_strings": StopStrings(WORDS, STRINGS)})
    yield engines
    for engine in engines:
        await engine.close()


@pytest.fixture(scope="module")
def tied_engine(tied_engines):
    return tied_engines[0]


async def check_updates_in_flight(engine, models):
    """Swap through all models while sequences are under way; check each token of them."""
    versions = iter(models.items())
    await engine.swap_weights(publish_version(next(versions)))
    requests = [
        request_for(prompt, max_new_tokens=100, temperature=temperature)
        for prompt in (PROMPT, (9,), LONG_PROMPT)
        for temperature in (1.0, 0.7)
    ]
    generating = [asyncio.create_task(engine.generate(request)) for request in requests]
    taken_over = [await engine.swap_weights(publish_version(version)) for version in versions]
    generations = await asyncio.gather(*generating)
    for generation, request in zip(generations, requests, strict=True):
        assert_scored_by_its_versions(generation, request, models)
    assert max(taken_over) > 0
    assert max(len(generation.version_spans) for generation in generations) > 1


def publish_version(version):
    number, model = version
    return weights_of(model, number)


# Starting vLLM is most of the time of these tests: engines are shared, and the loop with them.
@pytest.mark.asyncio(loop_scope="module")
class TestEngine:
    async def test_every_token_is_scored_by_the_version_that_its_span_names(self, engine):
        models = {number: build(seed=number) for number in (11, 12, 13, 14)}
        await check_updates_in_flight(engine, models)

    async def test_vllm_adds_no_metrics_of_its_own(self, engine):
        names = {family.name for family in REGISTRY.collect()}
        assert [name for name in names if name.startswith("vllm")] == []

    async def test_a_head_tied_to_the_embedding_is_updated_with_it(self, tied_engine):
        models = {
            number: build(seed=number, tied=True, tokenizer=WORDS) for number in (21, 22, 23, 24)
        }
        await check_updates_in_flight(tied_engine, models)

    async def test_rows_that_no_token_has_are_never_drawn(self, tied_engine):
        model = build(seed=25, tied=True, tokenizer=WORDS)
        with torch.no_grad():
            model.lm_head.weight[[11, 12, *range(32, 40)]] = 1e3
        for version in (25, 26):  # a reload must not bring the rows back
            await tied_engine.swap_weights(weights_of(model, version))
            request = request_for(PROMPT, max_new_tokens=200, temperature=2.0)
            generation = await tied_engine.generate(request)
            assert set(generation.token_ids) <= {*range(11), *range(13, 32)}
            assert_scored_by_its_versions(generation, request, {version: model})

    async def test_a_prompt_with_an_id_that_no_token_has_is_refused(self, tied_engine):
        with pytest.raises(EngineError, match=r"not all tokens of the model \(0 to 31\)"):
            await tied_engine.generate(request_for((5, 32)))

    async def test_seeded_prompts_that_fill_more_than_one_step_are_sampled(self, engine):
        models = {27: build(seed=27)}
        await engine.swap_weights(weights_of(models[27], 27))
        # By itself vLLM reads 2,048 tokens in a step on a CPU, and dies of a seeded prompt's part.
        requests = [
            request_for((number, *range(40)) * 10, max_new_tokens=2, seed=number)
            for number in range(NUM_PLACES)
        ]
        assert sum(len(each.prompt_token_ids) for each in requests[1:]) > 2048
        generations = await asyncio.gather(*map(engine.generate, requests))
        for generation, request in zip(generations, requests, strict=True):
            assert_scored_by_its_versions(generation, request, models)

    async def test_no_prefix_read_by_old_weights_is_used_with_new_ones(self, engine):
        models = {number: build(seed=number) for number in (31, 32)}
        request = request_for(LONG_PROMPT)
        for version in models.items():
            await engine.swap_weights(publish_version(version))
            generation = await engine.generate(request)
            assert [span.policy_version for span in generation.version_spans] == [version[0]]
            assert_scored_by_its_versions(generation, request, models)

    async def test_with_kept_keys_a_token_is_scored_by_new_weights_that_read_old_keys(
        self, keeping_engine
    ):
        models = {number: build(seed=number) for number in (33, 34, 35, 36)}
        versions = iter(models.items())
        await keeping_engine.swap_weights(publish_version(next(versions)))
        requests = [
            request_for(prompt, max_new_tokens=100) for prompt in (PROMPT, (9,), LONG_PROMPT)
        ]
        generating = [asyncio.create_task(keeping_engine.generate(each)) for each in requests]
        for version in versions:
            await keeping_engine.swap_weights(publish_version(version))
        generations = await asyncio.gather(*generating)
        ages = []
        for generation, request in zip(generations, requests, strict=True):
            assert_scored_with_kept_keys(generation, request, models)
            first = generation.version_spans[0].policy_version
            for span in generation.version_spans:
                ages.append(span.key_age_versions)
                # A request that waited for its place may count as older than it is.
                assert span.key_age_versions >= span.policy_version - first
        assert max(ages) > 0

    async def test_with_kept_keys_no_prefix_is_shared_across_versions(self, keeping_engine):
        models = {number: build(seed=number) for number in (37, 38)}
        request = request_for(LONG_PROMPT)
        for version in models.items():
            await keeping_engine.swap_weights(publish_version(version))
            for _ in range(2):  # the second one reads what the first one has cached
                generation = await keeping_engine.generate(request)
                (span,) = generation.version_spans
                assert (span.policy_version, span.key_age_versions) == (version[0], 0)
                assert_scored_by_its_versions(generation, request, models)

    async def test_a_version_that_is_no_later_one_finds_no_kept_keys(self, keeping_engine):
        models = {number: build(seed=number) for number in (39, 30)}
        await keeping_engine.swap_weights(weights_of(models[39], 39))
        request = request_for(LONG_PROMPT, max_new_tokens=100)
        generating = asyncio.create_task(keeping_engine.generate(request))
        await keeping_engine.swap_weights(weights_of(models[30], 30))
        for generation in (await generating, await keeping_engine.generate(request)):
            assert {span.key_age_versions for span in generation.version_spans} == {0}
            assert_scored_by_its_versions(generation, request, models)

    async def test_an_end_token_ends_the_response_and_is_part_of_it(self, engine):
        model = build(seed=0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            model.model.embed_tokens.weight.fill_(1.0)
            model.model.norm.weight.fill_(1.0)
            model.lm_head.weight[3] = 10.0
        await engine.swap_weights(weights_of(model, 41))
        generation = await engine.generate(request_for(PROMPT))
        assert generation.token_ids == (3,)
        assert generation.finish_reason is FinishReason.STOP

    async def test_weights_that_are_not_numbers_fail_the_generation(self, engine):
        model = build(seed=0)
        with torch.no_grad():
            model.lm_head.weight.fill_(float("nan"))
        await engine.swap_weights(weights_of(model, 42))
        with pytest.raises(EngineError, match="policy version 42 gives logits"):
            await engine.generate(request_for(PROMPT))

    async def test_cancelled_generations_free_their_places(self, engine):
        await engine.swap_weights(weights_of(build(seed=0), 61))
        endless = request_for((9,), max_new_tokens=ENDLESS)
        unwanted = [asyncio.create_task(engine.generate(endless)) for _ in range(NUM_PLACES)]
        # One of them may have sampled the end, or not have begun.
        assert 1 <= await engine.swap_weights(weights_of(build(seed=0), 62)) <= NUM_PLACES
        for task in unwanted:
            task.cancel()
        await asyncio.wait(unwanted)
        assert await engine.swap_weights(weights_of(build(seed=0), 63)) == 0
        generation = await engine.generate(request_for(PROMPT, max_new_tokens=2))
        assert 1 <= len(generation.token_ids) <= 2

    async def test_an_interrupted_response_is_resumed_by_a_later_version(self, engine):
        models = {64: build(seed=64), 65: build(seed=65)}
        await engine.swap_weights(weights_of(models[64], 64))
        request = request_for(PROMPT, max_new_tokens=ENDLESS)
        interrupt = asyncio.Event()
        generating = [
            asyncio.create_task(engine.generate(request, interrupt=interrupt))
            for _ in range(NUM_PLACES - 1)
        ]
        # All step together: once this one has ended, the others have tokens. Few have ended too.
        await engine.generate(request_for(PROMPT, max_new_tokens=8))
        interrupt.set()
        ends = await asyncio.gather(*generating, return_exceptions=True)
        cuts = [end.partial_response for end in ends if isinstance(end, GenerationInterruptedError)]
        partial = next(each for each in cuts if each is not None)
        await engine.swap_weights(weights_of(models[65], 65))
        rest = replace(request, partial_response=partial, max_new_tokens=len(partial.token_ids) + 5)
        generation = await engine.generate(rest)
        assert generation.token_ids[: len(partial.token_ids)] == partial.token_ids
        assert generation.logprobs[: len(partial.logprobs)] == partial.logprobs
        assert generation.version_spans[-1].policy_version == 65
        assert_scored_by_its_versions(generation, rest, models)

    async def test_a_swap_that_its_caller_gave_up_is_finished(self, engine):
        await engine.swap_weights(weights_of(build(seed=0), 71))
        swapping = asyncio.create_task(engine.swap_weights(weights_of(build(seed=0), 72)))
        await asyncio.sleep(0)  # it has started
        swapping.cancel()
        await asyncio.wait([swapping])
        await engine.swap_weights(weights_of(build(seed=0), 73))
        generation = await engine.generate(request_for(PROMPT, max_new_tokens=2))
        assert [span.policy_version for span in generation.version_spans] == [73]


def end_of(token_ids):
    """The number of tokens at which a response ends, by the definition; None if it does not."""
    for size, token_id in enumerate(token_ids, start=1):
        text = WORDS.decode(list(token_ids[:size]), skip_special_tokens=False)
        if token_id == END or any(string in text for string in STRINGS):
            return size
    return None


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stop_string_ends_a_response_at_its_token_whatever_is_swapped_in(tied_engines):
    engine = tied_engines[1]
    models = {number: build(seed=number, tied=True, tokenizer=WORDS) for number in (51, 52, 53)}
    await engine.swap_weights(weights_of(models[51], 51))
    request = request_for(PROMPT, max_new_tokens=40)
    generating = [asyncio.create_task(engine.generate(request)) for _ in range(40)]
    for number in (52, 53):
        await engine.swap_weights(weights_of(models[number], number))
    generations = await asyncio.gather(*generating)
    for generation in generations:
        end = end_of(generation.token_ids)
        assert len(generation.token_ids) == (end or 40)
        assert generation.finish_reason is (FinishReason.STOP if end else FinishReason.LENGTH)
        assert_scored_by_its_versions(generation, request, models)
    by_string = [each for each in generations if each.token_ids[-1] != END]
    assert FinishReason.STOP in {each.finish_reason for each in by_string}
