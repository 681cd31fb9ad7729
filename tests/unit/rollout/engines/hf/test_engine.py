"""The engine's thread: no caller waits for ever, and none gets the tokens of another."""

import asyncio
import threading

import pytest
import torch

from tests.fixtures.rollout.models import build_model, forward_logprobs, request_for, weights_of
from vcpo.api.workloads import Precision
from vcpo.wire.trajectory import FinishReason, PartialResponse, VersionSpan
from vcpo_rollout.engines.engine import EngineError, GenerationInterruptedError
from vcpo_rollout.engines.hf.engine import HfEngine, worth_joining

PROMPT = (5, 6, 7)
END = 3
ENDLESS = 1 << 19
"""More tokens than a test lives to see."""


@pytest.fixture
async def start():
    """Engines on given models, closed when the test is over."""
    engines = []

    def start(model, *, num_slots=4, end_token_ids=frozenset(), **settings):
        engine = HfEngine(
            model,
            end_token_ids=end_token_ids,
            pad_token_id=0,
            max_concurrent_sequences=num_slots,
            seed=0,
            **settings,
        )
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.close()


def on_forward(model, *, number):
    """An event that the model's forward pass of this number sets, whatever thread it runs in."""
    event, loop, passes = asyncio.Event(), asyncio.get_running_loop(), iter(range(1, number + 1))

    def count(*_):
        if next(passes, None) == number:
            loop.call_soon_threadsafe(event.set)

    model.register_forward_hook(count)
    return event


def certain(model, *, token):
    """Change the model so that it always says this token, and return it.

    Every layer adds nothing, so the state is the embedding: ones, of which the head sums a row.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[token] = 10.0
    return model


async def test_nothing_is_generated_before_the_first_policy(start):
    engine = start(build_model())
    generating = asyncio.create_task(engine.generate(request_for(PROMPT)))
    assert engine.policy_version is None
    assert await engine.swap_weights(weights_of(build_model(seed=1), 4)) == 0
    generation = await generating
    assert engine.policy_version == 4
    assert [span.policy_version for span in generation.version_spans] == [4]


async def test_a_sequence_in_progress_continues_with_new_weights(start):
    model = build_model()
    engine = start(model, end_token_ids=frozenset({END}))
    await engine.swap_weights(weights_of(certain(build_model(), token=8), 1))
    under_way = on_forward(model, number=3)
    request = request_for(PROMPT, max_new_tokens=ENDLESS)
    generating = asyncio.create_task(engine.generate(request))
    await under_way.wait()
    assert await engine.swap_weights(weights_of(certain(build_model(), token=END), 2)) == 1
    generation = await generating
    first, second = generation.version_spans
    assert (first.policy_version, second.policy_version, second.num_tokens) == (1, 2, 1)
    assert generation.token_ids == (8,) * first.num_tokens + (END,)
    assert generation.finish_reason is FinishReason.STOP


async def test_a_batch_never_holds_more_than_its_places(start):
    model, sizes = build_model(), []
    engine = start(model, num_slots=2)
    await engine.swap_weights(weights_of(build_model(), 1))
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["attention_mask"])), with_kwargs=True
    )
    await asyncio.gather(*(engine.generate(request_for(PROMPT)) for _ in range(5)))
    assert max(sizes) == 2


async def test_a_bad_payload_leaves_the_old_weights_in_use(start):
    engine, policy = start(build_model(seed=0)), build_model(seed=1)
    await engine.swap_weights(weights_of(policy, 1))
    with pytest.raises(EngineError, match="do not fit the model"):
        await engine.swap_weights(weights_of(build_model(seed=2, tied=True), 2))
    generation = await engine.generate(request_for(PROMPT))
    assert engine.policy_version == 1
    expected = forward_logprobs(policy, PROMPT, generation.token_ids)
    assert generation.logprobs == pytest.approx(expected, abs=1e-5)


async def test_closing_fails_what_is_under_way_what_waits_and_what_comes(start):
    model = build_model()
    engine = start(model, num_slots=1)
    await engine.swap_weights(weights_of(build_model(), 1))
    under_way = on_forward(model, number=2)
    endless = request_for(PROMPT, max_new_tokens=ENDLESS)
    generating = [asyncio.create_task(engine.generate(endless)) for _ in range(3)]
    await under_way.wait()
    await engine.close()
    for task in generating:
        with pytest.raises(EngineError, match="closed"):
            await task
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(endless)


async def test_closing_twice_is_allowed_and_ends_the_thread(start):
    before = threading.active_count()
    engine = start(build_model())
    running = threading.active_count()
    await engine.close()
    await engine.close()
    names = [thread.name for thread in threading.enumerate()]
    assert running == before + 1
    assert "hf-engine" not in names


async def test_a_failure_in_the_thread_reaches_every_caller_and_ends_the_engine(start):
    model = build_model()

    def fail(*_):
        raise RuntimeError("out of luck")

    engine = start(model)
    await engine.swap_weights(weights_of(build_model(), 1))
    model.register_forward_hook(fail)
    results = await asyncio.gather(
        *(engine.generate(request_for(PROMPT)) for _ in range(2)), return_exceptions=True
    )
    assert [type(result) for result in results] == [EngineError, EngineError]
    for attempt in (
        engine.generate(request_for(PROMPT)),
        engine.swap_weights(weights_of(build_model(), 2)),
    ):
        with pytest.raises(EngineError, match="RuntimeError: out of luck"):
            await attempt


async def test_a_cancelled_generation_frees_its_place(start):
    model = build_model()
    engine = start(model, num_slots=1)
    await engine.swap_weights(weights_of(build_model(), 1))
    under_way = on_forward(model, number=2)
    endless = request_for(PROMPT, max_new_tokens=ENDLESS)
    unwanted = asyncio.create_task(engine.generate(endless))
    await under_way.wait()
    unwanted.cancel()
    generation = await engine.generate(request_for(PROMPT, max_new_tokens=2))
    assert len(generation.token_ids) == 2


async def test_a_generation_cancelled_while_it_waits_is_never_started(start):
    model, widths = build_model(), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    engine = start(model, num_slots=1)
    endless = request_for(PROMPT, max_new_tokens=ENDLESS)
    unwanted = asyncio.create_task(engine.generate(endless))
    wanted = asyncio.create_task(engine.generate(request_for(PROMPT, max_new_tokens=2)))
    await asyncio.sleep(0)  # both have been handed over
    unwanted.cancel()
    await engine.swap_weights(weights_of(build_model(), 1))
    assert len((await wanted).token_ids) == 2
    assert widths.count(len(PROMPT)) == 1  # one prompt was read


async def test_bfloat16_rounds_parameters_and_scores_in_float32(start):
    model, policy = build_model(), build_model(seed=1)
    engine = start(model, precision=Precision.BFLOAT16)
    await engine.swap_weights(weights_of(policy, 1))
    generation = await engine.generate(request_for(PROMPT))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    expected = forward_logprobs(policy.bfloat16(), PROMPT, generation.token_ids)
    assert generation.logprobs == pytest.approx(expected, abs=0.1)
    # A bfloat16 logarithm has 8 significant bits; of eight in float32 some need more.
    rounded = torch.tensor(generation.logprobs).bfloat16().float()
    assert not torch.equal(rounded, torch.tensor(generation.logprobs))


@pytest.mark.parametrize(
    ("prompt", "changes", "problem"),
    [
        ((), {}, "prompt_token_ids: empty"),
        ((5, 40), {}, "prompt_token_ids: 5 to 40"),
        ((-1, 5), {}, "prompt_token_ids: -1 to 5"),
        (PROMPT, {"max_new_tokens": 1 << 20}, "spec.sampling.maxNewTokens"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused(start, prompt, changes, problem):
    with pytest.raises(EngineError, match=problem):
        await start(build_model()).generate(request_for(prompt, **changes))


async def begin(start, model, *, policy=None, version=1, **settings):
    """An engine with a policy in use, or without any."""
    engine = start(model, **settings)
    if policy is not None:
        await engine.swap_weights(weights_of(policy, version))
    return engine


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
async def test_a_response_interrupted_by_one_engine_is_resumed_by_another(start, sliding_window):
    old, new = (build_model(seed=seed, sliding_window=sliding_window) for seed in (1, 2))
    model = build_model(sliding_window=sliding_window)
    first = await begin(start, model, policy=old, version=3)
    started = on_forward(model, number=6)
    partial = await interrupt_generation(
        first, request_for(PROMPT, max_new_tokens=ENDLESS), started
    )
    size = len(partial.token_ids)
    assert partial.version_spans == (VersionSpan(policy_version=3, num_tokens=size),)

    second = await begin(start, build_model(sliding_window=sliding_window), policy=new, version=7)
    request = request_for(PROMPT, max_new_tokens=size + 5, partial_response=partial)
    # A neighbour that began elsewhere changes nobody's numbers.
    generation, _ = await asyncio.gather(
        second.generate(request), second.generate(request_for((9,), max_new_tokens=30))
    )
    assert generation.token_ids[:size] == partial.token_ids
    assert generation.logprobs[:size] == partial.logprobs
    assert generation.version_spans == (
        *partial.version_spans,
        VersionSpan(policy_version=7, num_tokens=5),
    )
    assert generation.finish_reason is FinishReason.LENGTH
    by_old = forward_logprobs(old, PROMPT, generation.token_ids)
    by_new = forward_logprobs(new, PROMPT, generation.token_ids)
    expected = [*by_old[:size], *by_new[size:]]
    assert generation.logprobs == pytest.approx(expected, abs=1e-5)


async def test_tokens_resumed_under_the_same_version_are_one_span(start):
    engine = await begin(start, build_model(), policy=build_model(), version=2)
    partial = PartialResponse(
        token_ids=(8, 9),
        logprobs=(-0.5, -0.25),
        version_spans=(VersionSpan(policy_version=2, num_tokens=2),),
    )
    generation = await engine.generate(
        request_for(PROMPT, max_new_tokens=3, partial_response=partial)
    )
    assert generation.version_spans == (VersionSpan(policy_version=2, num_tokens=3),)
    assert generation.logprobs[:2] == (-0.5, -0.25)


async def test_one_event_interrupts_many_and_frees_their_slots(start):
    model = build_model()
    engine = await begin(start, model, policy=build_model(), num_slots=2)
    started = on_forward(model, number=3)
    interrupt, endless = asyncio.Event(), request_for(PROMPT, max_new_tokens=ENDLESS)
    generating = [
        asyncio.create_task(engine.generate(endless, interrupt=interrupt)) for _ in range(3)
    ]
    await started.wait()
    interrupt.set()
    ends = await asyncio.gather(*generating, return_exceptions=True)
    sampled = [end.partial_response for end in ends]
    assert len(sampled[0].token_ids) == len(sampled[1].token_ids) >= 1
    assert sampled[2] is None  # it had no slot yet
    generation = await engine.generate(request_for(PROMPT, max_new_tokens=2))
    assert len(generation.token_ids) == 2


@pytest.mark.parametrize("has_policy", [True, False], ids=["policy", "no policy yet"])
async def test_an_interrupt_requested_before_costs_at_most_a_step(start, has_policy):
    engine = await begin(start, build_model(), policy=build_model() if has_policy else None)
    interrupt = asyncio.Event()
    interrupt.set()
    with pytest.raises(GenerationInterruptedError):
        await engine.generate(request_for(PROMPT, max_new_tokens=ENDLESS), interrupt=interrupt)


@pytest.mark.parametrize(
    ("num_free", "num_slots", "steps_since_join", "worth"),
    [
        (64, 64, 1, True),
        (8, 64, 1, True),
        (7, 64, 1, False),
        (7, 64, 8, True),
        (1, 4, 1, True),
        (0, 4, 100, False),
    ],
    ids=["empty", "an eighth", "less", "less, for long", "few slots", "full"],
)
def test_sequences_join_many_at_once_or_soon(num_free, num_slots, steps_since_join, worth):
    decided = worth_joining(
        num_free=num_free, num_slots=num_slots, steps_since_join=steps_since_join
    )
    assert decided is worth
