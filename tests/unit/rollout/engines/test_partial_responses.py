"""Interrupted and resumed responses: no token is lost, scored twice or labelled again."""

import asyncio

import pytest

from vcpo.wire.trajectory import FinishReason, PartialResponse, VersionSpan
from vcpo_rollout.engines.engine import GenerationInterruptedError
from vcpo_rollout.engines.hf.engine import HfEngine

PROMPT = (5, 6, 7)
ENDLESS = 1 << 19
"""More tokens than a test lives to see."""


@pytest.fixture
async def start(publish):
    """Engines with a policy in use as version 1, or without any; closed when the test is over."""
    engines = []

    async def start(model, *, policy=None, version=1, **settings):
        settings = {"end_token_ids": frozenset(), "max_concurrent_sequences": 4, **settings}
        engine = HfEngine(model, pad_token_id=0, seed=0, **settings)
        engines.append(engine)
        if policy is not None:
            await engine.swap_weights(publish(policy, version))
        return engine

    yield start
    for engine in engines:
        await engine.close()


def under_way(model, *, passes):
    """An event that is set in the forward pass of this number, whatever thread it runs in."""
    event, loop, count = asyncio.Event(), asyncio.get_running_loop(), iter(range(1, passes + 1))

    def tick(*_):
        if next(count, None) == passes:
            loop.call_soon_threadsafe(event.set)

    model.register_forward_hook(tick)
    return event


async def interrupt_generation(engine, request, started):
    """Interrupt a generation once it has started; return its partial response."""
    interrupt = asyncio.Event()
    generating = asyncio.create_task(engine.generate(request, interrupt=interrupt))
    await started.wait()
    interrupt.set()
    with pytest.raises(GenerationInterruptedError) as caught:
        await generating
    return caught.value.partial_response


@pytest.mark.parametrize("sliding_window", [None, 4], ids=["full", "sliding"])
async def test_a_response_interrupted_by_one_engine_is_resumed_by_another(
    start, make_model, make_request, reference_logprobs, sliding_window
):
    old, new = (make_model(seed=seed, sliding_window=sliding_window) for seed in (1, 2))
    model = make_model(sliding_window=sliding_window)
    first = await start(model, policy=old, version=3)
    started = under_way(model, passes=6)
    partial = await interrupt_generation(
        first, make_request(PROMPT, max_new_tokens=ENDLESS), started
    )
    size = len(partial.token_ids)
    assert partial.version_spans == (VersionSpan(policy_version=3, num_tokens=size),)

    second = await start(make_model(sliding_window=sliding_window), policy=new, version=7)
    request = make_request(PROMPT, max_new_tokens=size + 5, partial_response=partial)
    # A neighbour that began elsewhere changes nobody's numbers.
    generation, _ = await asyncio.gather(
        second.generate(request), second.generate(make_request((9,), max_new_tokens=30))
    )
    assert generation.token_ids[:size] == partial.token_ids
    assert generation.logprobs[:size] == partial.logprobs
    assert generation.version_spans == (
        *partial.version_spans,
        VersionSpan(policy_version=7, num_tokens=5),
    )
    assert generation.finish_reason is FinishReason.LENGTH
    by_old = reference_logprobs(old, PROMPT, generation.token_ids)
    by_new = reference_logprobs(new, PROMPT, generation.token_ids)
    expected = [*by_old[:size], *by_new[size:]]
    assert generation.logprobs == pytest.approx(expected, abs=1e-5)


async def test_tokens_resumed_under_the_same_version_are_one_span(start, make_model, make_request):
    engine = await start(make_model(), policy=make_model(), version=2)
    partial = PartialResponse(
        token_ids=(8, 9),
        logprobs=(-0.5, -0.25),
        version_spans=(VersionSpan(policy_version=2, num_tokens=2),),
    )
    generation = await engine.generate(
        make_request(PROMPT, max_new_tokens=3, partial_response=partial)
    )
    assert generation.version_spans == (VersionSpan(policy_version=2, num_tokens=3),)
    assert generation.logprobs[:2] == (-0.5, -0.25)


async def test_one_event_interrupts_many_and_frees_their_slots(start, make_model, make_request):
    model = make_model()
    engine = await start(model, policy=make_model(), max_concurrent_sequences=2)
    started = under_way(model, passes=3)
    interrupt, endless = asyncio.Event(), make_request(PROMPT, max_new_tokens=ENDLESS)
    generating = [
        asyncio.create_task(engine.generate(endless, interrupt=interrupt)) for _ in range(3)
    ]
    await started.wait()
    interrupt.set()
    ends = await asyncio.gather(*generating, return_exceptions=True)
    sampled = [end.partial_response for end in ends]
    assert len(sampled[0].token_ids) == len(sampled[1].token_ids) >= 1
    assert sampled[2] is None  # it had no slot yet
    generation = await engine.generate(make_request(PROMPT, max_new_tokens=2))
    assert len(generation.token_ids) == 2


async def test_a_resumed_response_can_be_interrupted_again(start, make_model, make_request):
    model = make_model()
    engine = await start(model, policy=make_model())
    started = under_way(model, passes=4)
    partial = PartialResponse(
        token_ids=(8,),
        logprobs=(-0.5,),
        version_spans=(VersionSpan(policy_version=0, num_tokens=1),),
    )
    request = make_request(PROMPT, max_new_tokens=ENDLESS, partial_response=partial)
    later = await interrupt_generation(engine, request, started)
    assert later.token_ids[0] == 8
    assert [span.policy_version for span in later.version_spans] == [0, 1]


@pytest.mark.parametrize("has_policy", [True, False], ids=["policy", "no policy yet"])
async def test_an_interrupt_requested_before_costs_at_most_a_step(
    start, make_model, make_request, has_policy
):
    engine = await start(make_model(), policy=make_model() if has_policy else None)
    interrupt = asyncio.Event()
    interrupt.set()
    with pytest.raises(GenerationInterruptedError):
        await engine.generate(make_request(PROMPT, max_new_tokens=ENDLESS), interrupt=interrupt)
