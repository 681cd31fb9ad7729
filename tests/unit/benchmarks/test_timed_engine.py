"""Interrupts do not change response lengths, and the engine records what each version sampled."""

import asyncio
import random
from statistics import mean

import pytest

from benchmarks.harness.timed_engine import Lengths, TimedEngine
from vcpo.wire.trajectory import VersionSpan
from vcpo_rollout.engines.engine import GenerationInterruptedError, GenerationRequest, PolicyWeights

LENGTHS = Lengths(median=48.0, sigma=1.0, most=1024)


def test_half_of_the_responses_are_longer_than_the_median():
    rng = random.Random(0)
    drawn = [LENGTHS.draw(rng, 0) for _ in range(20_000)]
    assert mean(length > 48 for length in drawn) == pytest.approx(0.5, abs=0.02)
    assert min(drawn) >= 1
    assert max(drawn) == 1024


def test_going_on_with_a_response_draws_from_what_is_left_of_the_lengths():
    # One standard deviation: of those above 48 the share 0.1587 / 0.5 is above 48 e = 130.5.
    rng = random.Random(0)
    drawn = [LENGTHS.draw(rng, 48) for _ in range(20_000)]
    assert min(drawn) == 49
    assert mean(length > 130 for length in drawn) == pytest.approx(0.3174, abs=0.015)


def test_the_longest_of_two_lengths_is_longer_on_average_than_one():
    # Each length is 1 or 2 with probability 1/2: both are 1 in one case of four.
    lengths = Lengths(median=1.0, sigma=1.0, most=2)
    assert lengths.expected_longest(1) == pytest.approx(1.5)
    assert lengths.expected_longest(2) == pytest.approx(1.75)


def test_the_mean_of_the_longest_is_that_of_drawn_lengths():
    rng = random.Random(0)
    drawn = [max(LENGTHS.draw(rng, 0) for _ in range(8)) for _ in range(5_000)]
    assert LENGTHS.expected_longest(8) == pytest.approx(mean(drawn), rel=0.03)


async def test_an_interrupted_response_keeps_its_spans_and_is_resumed():
    lengths = Lengths(median=1000.0, sigma=0.01, most=10)
    engine = TimedEngine(lengths, step_s=0.0, sequence_s=0.0, seed=0)
    request = GenerationRequest(prompt_token_ids=(1,), temperature=1.0, max_new_tokens=10)
    await engine.swap_weights(PolicyWeights.whole(3, b""))
    interrupt = asyncio.Event()
    sampling = asyncio.create_task(engine.generate(request, interrupt=interrupt))
    await asyncio.sleep(0)
    for _ in range(4):
        engine.step()
    interrupt.set()
    engine.step()
    with pytest.raises(GenerationInterruptedError) as caught:
        await sampling
    assert caught.value.partial_response.version_spans == (
        VersionSpan(policy_version=3, num_tokens=4),
    )
    assert engine.num_sampled == 4
