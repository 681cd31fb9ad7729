"""A lease that is about to expire is released with its samples."""

import asyncio

import pytest

from tests.fixtures.rollout.worker import ManualTime, eventually, learner_fixture, run_in_task
from vcpo_rollout.generation.worker import interrupt_after_s

# Leases of `make_run` last 10 s, of which the last second is for handing back.


@pytest.mark.parametrize(
    ("timeout_s", "expected_s"), [(600.0, 590.0), (100.0, 90.0), (10.0, 9.0), (1.0, 0.9)]
)
def test_a_tenth_of_a_lease_and_at_most_ten_seconds_are_left_to_hand_back(timeout_s, expected_s):
    assert interrupt_after_s(timeout_s) == pytest.approx(expected_s)


async def test_sampled_tokens_are_resumed_after_the_lease_expired():
    async with learner_fixture() as fixture:
        time = ManualTime(fixture.clock)
        fixture.engine.gate.clear()
        fixture.publish(0)
        async with run_in_task(fixture.worker(places=2, time=time)):
            await eventually(lambda: fixture.engine.sampling == 2)
            time.advance(8.9)
            assert fixture.ledger.counts().dropped == {}
            time.advance(0.1)
            await eventually(lambda: len(fixture.engine.requests) == 4)
        assert fixture.ledger.expire() == []
    before, after = fixture.engine.requests[:2], fixture.engine.requests[2:]
    assert [request.partial_response for request in before] == [None, None]
    assert [request.partial_response.token_ids for request in after] == [(5,), (5,)]


async def test_the_responses_of_an_evaluation_have_all_of_their_time():
    async with learner_fixture() as fixture:
        time = ManualTime(fixture.clock)
        fixture.engine.gate.clear()
        fixture.publish(0)
        evaluating = asyncio.create_task(fixture.dispatcher.evaluate(0, exclusive=True))
        async with run_in_task(fixture.worker(places=2, time=time)):
            await eventually(lambda: fixture.engine.sampling == 1)
            time.advance(9.5)
            fixture.engine.gate.set()
            assert (await evaluating).num_trajectories == 1
    assert len(fixture.engine.requests) == 1
