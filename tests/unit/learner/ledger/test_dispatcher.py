"""The dispatcher's decisions. A manual clock stands still unless a test advances it."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import (
    dispatcher_fixture,
    make_partial_response,
    make_trajectories,
    make_trajectory,
    settle,
    work_request,
)
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.failures import Failure, FailureCause
from vcpo.wire.versions import version_of
from vcpo_learner.ledger import dispatcher as dispatcher_module
from vcpo_learner.ledger.lease import Purpose

FAILURE = Failure(cause=FailureCause.REWARD, message="no such item")


@pytest.fixture
def fixture():
    return dispatcher_fixture()


async def lease_now(fixture, **request):
    return await fixture.dispatcher.lease(work_request(**request), wait_s=0)


def waiting_lease(fixture, **request):
    return asyncio.create_task(fixture.dispatcher.lease(work_request(**request), wait_s=30))


def prompts_of(assignments):
    return [one.prompt_index for one in assignments]


async def begin_round(fixture, *, exclusive, step=0):
    task = asyncio.create_task(fixture.dispatcher.evaluate(step, exclusive=exclusive))
    await settle()
    return task


class TestAdmission:
    async def test_work_is_granted_up_to_the_lag_limit(self, fixture):
        # (k + 1 + v) * B = (1 + 1 + 0) * 4 = 8 trajectories, 4 prompts.
        assert prompts_of(await lease_now(fixture)) == [0, 1, 2, 3]
        assert await lease_now(fixture) == []

    async def test_the_version_that_counts_is_the_one_the_worker_holds(self, fixture):
        fixture.dispatcher.policy_version = 1
        stale = await lease_now(fixture, worker_id="stale", held=0)
        fresh = await lease_now(fixture, worker_id="fresh", held=1)
        assert (len(stale), len(fresh)) == (4, 2)

    async def test_a_version_that_does_not_exist_yet_admits_no_more_than_the_newest(self, fixture):
        assert len(await lease_now(fixture, held=1000)) == 4

    async def test_whole_groups_are_granted_into_the_room_there_is(self, fixture):
        assert len(await lease_now(fixture, room=5)) == 2
        assert await lease_now(fixture, room=1) == []

    async def test_a_holder_of_another_incarnations_weights_gets_nothing(self, fixture):
        assert await lease_now(fixture, incarnation="before") == []

    async def test_no_more_is_granted_than_the_run_will_consume(self):
        fixture = dispatcher_fixture(algorithm={"maxPolicyLagSteps": 100})
        assert len(await lease_now(fixture)) == 6  # 3 steps of 2 prompts

    async def test_what_was_dropped_may_be_granted_again_at_the_end(self):
        fixture = dispatcher_fixture(algorithm={"maxPolicyLagSteps": 100})
        await lease_now(fixture)
        fixture.dispatcher.release("w", [])
        assert len(await lease_now(fixture)) == 6

    @given(limit=st.integers(0, 10))
    async def test_a_throttle_never_lifts_the_runs_own_bound(self, limit):
        fixture = dispatcher_fixture()
        assert fixture.dispatcher.throttle(limit) == min(limit, 1)
        assert len(await lease_now(fixture)) == 2 * (min(limit, 1) + 1)


class TestWaiting:
    async def test_a_waiting_request_gets_a_lease_when_a_throttle_is_lifted(self, fixture):
        fixture.dispatcher.throttle(0)
        await lease_now(fixture)
        waiting = waiting_lease(fixture)
        await settle()
        assert not waiting.done()
        fixture.dispatcher.throttle(1)
        assert prompts_of(await waiting) == [2, 3]

    async def test_a_waiting_request_gets_a_lease_that_is_released(self, fixture):
        await lease_now(fixture, worker_id="gone")
        waiting = waiting_lease(fixture)
        await settle()
        fixture.dispatcher.release("gone", [])
        assert prompts_of(await waiting) == [0, 1, 2, 3]

    async def test_a_request_whose_time_is_up_gets_nothing(self):
        fixture = dispatcher_fixture(lease={"timeoutSeconds": 3600})
        fixture.dispatcher.throttle(0)
        await lease_now(fixture, worker_id="busy")
        waiting = asyncio.create_task(fixture.dispatcher.lease(work_request(), wait_s=5))
        await settle()
        fixture.clock.advance(5)
        fixture.dispatcher.notify()
        assert await waiting == []

    async def test_a_new_version_sends_a_blocked_worker_to_fetch_it(self, fixture):
        await lease_now(fixture)
        waiting = waiting_lease(fixture)
        await settle()
        fixture.dispatcher.policy_version = 1
        fixture.dispatcher.notify()
        await settle()
        assert waiting.done()
        assert waiting.result() == []

    async def test_the_end_of_the_run_answers_everybody_who_waits(self, fixture):
        await lease_now(fixture)
        waiting = waiting_lease(fixture)
        await settle()
        fixture.dispatcher.complete()
        assert await waiting == []


class TestWorkers:
    async def test_releasing_everything_says_goodbye(self, fixture):
        await lease_now(fixture)
        assert fixture.dispatcher.release("w", []) == 4
        assert fixture.dispatcher.registry.workers() == []

    async def test_nothing_is_granted_to_a_worker_released_while_it_waits(self, fixture):
        await lease_now(fixture, worker_id="dead")
        waiting = waiting_lease(fixture, worker_id="dead")
        await settle()
        fixture.dispatcher.release("dead", [])
        assert await waiting == []
        assert fixture.ledger.counts().in_flight == 0


class TestSubmissions:
    async def test_accepted_tokens_are_counted_once_and_for_training_only(self, fixture):
        round_ = await begin_round(fixture, exclusive=False)
        held_out, first, *_ = await lease_now(fixture) + await lease_now(fixture)
        fixture.submit(held_out)
        for _ in range(2):
            fixture.submit(first, versions=(0, 0, 0))
        assert fixture.dispatcher.accepted_tokens == 2 * 3
        await round_

    async def test_a_token_of_a_version_that_does_not_exist_is_refused(self, fixture):
        fixture.dispatcher.policy_version = 1
        (first, *_) = await lease_now(fixture)
        with pytest.raises(InvalidMessageError, match=r"trajectories\[0\]\.version_spans.*1.*2"):
            fixture.submit(first, versions=(1, 2))
        assert fixture.ledger.counts().buffered == 0

    async def test_a_token_older_than_what_its_worker_held_is_refused(self, fixture):
        fixture.dispatcher.policy_version = 3
        (lease,) = await lease_now(fixture, held=2, room=2)
        with pytest.raises(InvalidMessageError, match="at least version 2, which the worker held"):
            fixture.submit(lease, versions=(1, 3))
        assert fixture.submit(lease, versions=(2, 3)) == ["accepted"] * 2

    async def test_a_lease_may_carry_tokens_of_later_steps_that_a_restart_has_undone(self, fixture):
        fixture.dispatcher.policy_version = 3
        (begun,) = await lease_now(fixture, held=2, room=2)
        fixture.dispatcher.release("w", [begun.lease_id], [make_partial_response(2, 3)])
        now = fixture.dispatcher.policy_version = version_of(restarts=1, step=1)
        (again,) = await lease_now(fixture, held=now, room=2)
        assert fixture.submit(again, versions=(2, 3, now)) == ["accepted", "accepted"]
        (other,) = await lease_now(fixture, held=now, room=2)
        with pytest.raises(InvalidMessageError, match=rf"version_spans: must be at most .* {now}"):
            fixture.submit(other, versions=(now + 1,))

    async def test_tokens_that_an_ended_lease_carried_are_late_and_no_fault(self, fixture):
        fixture.dispatcher.policy_version = 3
        (begun,) = await lease_now(fixture, held=2, room=2)
        partial = [make_partial_response(2, 3)]
        fixture.dispatcher.release("w", [begun.lease_id], partial)
        fixture.dispatcher.policy_version = 1
        (again,) = await lease_now(fixture, held=1, room=2)
        fixture.dispatcher.release("w", [again.lease_id])
        assert fixture.submit(again, versions=(2, 3, 1)) == ["lease_ended", "lease_ended"]
        assert fixture.dispatcher.release("w", [again.lease_id], partial) == 0

    async def test_what_a_lease_of_the_learner_before_brings_is_late_and_no_fault(self, fixture):
        # Its version went further than this learner has come since its checkpoint.
        assert fixture.dispatcher.policy_version == 0
        sampled = [make_trajectory("train-before-7", 0, versions=(24,))]
        assert fixture.dispatcher.submit("w", "train-before-7", sampled) == ["lease_ended"]
        partial = [make_partial_response(24)]
        assert fixture.dispatcher.release("w", ["train-before-7"], partial) == 0
        fixture.dispatcher.fail("w", "train-before-7", FAILURE)
        assert fixture.dispatcher.failures.in_a_row == 0

    async def test_a_submission_wakes_no_worker_that_waits_for_work(self, fixture, monkeypatch):
        leases = await lease_now(fixture)
        waiting, asked = waiting_lease(fixture, worker_id="other"), []
        await settle()
        grant = fixture.dispatcher._grant
        monkeypatch.setattr(
            fixture.dispatcher, "_grant", lambda request: asked.append(request) or grant(request)
        )
        fixture.submit(leases[0])
        await settle()
        fixture.submit(leases[1])
        await settle()
        assert not asked
        assert await fixture.dispatcher.next_batch()
        fixture.dispatcher.advance_version()
        fixture.dispatcher.notify()
        assert await waiting == []  # it does not hold the newest version
        assert len(asked) == 1

    async def test_a_submission_that_is_dropped_makes_room_for_others_at_once(self, monkeypatch):
        monkeypatch.setattr(dispatcher_module, "_POLL_S", 3600.0)
        fixture = dispatcher_fixture(algorithm={"method": "dapo", "maxPolicyLagSteps": 1})
        first, *_ = await lease_now(fixture)
        waiting = waiting_lease(fixture)
        await settle()
        assert not waiting.done()
        fixture.submit(first)  # all rewards are equal
        assert prompts_of(await waiting) == [4]

    async def test_the_learner_wakes_when_its_batch_is_complete(self, fixture):
        waiting = asyncio.create_task(fixture.dispatcher.next_batch())
        first, second, *_ = await lease_now(fixture)
        fixture.submit(first)
        await settle()
        assert not waiting.done()
        fixture.submit(second)
        assert [group.prompt_index for group in await waiting] == [0, 1]

    async def test_a_drain_waits_for_what_is_in_flight(self, fixture):
        (first,) = await lease_now(fixture, room=2)
        fixture.dispatcher.drain()
        waiting = asyncio.create_task(fixture.dispatcher.wait_until_idle(5))
        await settle()
        assert not waiting.done()
        fixture.submit(first)
        await waiting
        assert fixture.ledger.counts().buffered == 2

    async def test_a_drain_does_not_wait_longer_than_it_may(self, fixture):
        await lease_now(fixture)
        waiting = asyncio.create_task(fixture.dispatcher.wait_until_idle(5))
        await settle()
        fixture.clock.advance(5)
        fixture.dispatcher.notify()
        await waiting
        assert fixture.ledger.counts().in_flight == 8


class TestEvaluation:
    async def test_held_out_prompts_go_first(self, fixture):
        round_ = await begin_round(fixture, exclusive=False)
        (held_out,) = await lease_now(fixture)
        assert held_out.purpose is Purpose.EVALUATION
        assert {one.purpose for one in await lease_now(fixture)} == {Purpose.TRAIN}
        fixture.submit(held_out, reward=0.5)
        assert (await round_).record.accuracy == 0.5

    async def test_no_training_prompt_is_granted_during_an_exclusive_round(self, fixture):
        round_ = await begin_round(fixture, exclusive=True)
        (held_out,) = await lease_now(fixture)
        assert await lease_now(fixture) == []
        fixture.submit(held_out)
        await round_
        assert len(await lease_now(fixture)) == 4

    async def test_only_the_newest_version_answers_an_exclusive_round(self, fixture):
        fixture.dispatcher.policy_version = 3
        round_ = await begin_round(fixture, exclusive=True)
        assert await lease_now(fixture, held=2) == []
        (held_out,) = await lease_now(fixture, held=3)
        fixture.submit(held_out, versions=(3,))
        assert (await round_).record.policy_version_min == 3

    async def test_a_round_waits_for_the_one_under_way(self, fixture):
        first = await begin_round(fixture, exclusive=False, step=1)
        second = await begin_round(fixture, exclusive=True, step=2)
        (held_out,) = await lease_now(fixture)
        assert len(await lease_now(fixture)) == 4  # the first, which is not exclusive, is under way
        fixture.submit(held_out)
        assert (await first).record.step == 1
        await settle()
        (held_out,) = await lease_now(fixture)
        fixture.submit(held_out)
        assert (await second).record.step == 2

    async def test_a_drain_ends_the_round_and_those_that_wait_for_it(self, fixture):
        rounds = [await begin_round(fixture, exclusive=False, step=step) for step in (1, 2)]
        fixture.dispatcher.drain()
        assert await asyncio.gather(*rounds) == [None, None]

    async def test_a_cancelled_round_is_left_by_everybody(self, fixture):
        round_ = await begin_round(fixture, exclusive=True)
        (held_out,) = await lease_now(fixture)
        round_.cancel()
        await settle()
        assert fixture.submit(held_out) == ["lease_ended"]
        assert {one.purpose for one in await lease_now(fixture)} == {Purpose.TRAIN}


async def test_the_batch_taken_is_the_one_the_version_allows(fixture):
    leases = await lease_now(fixture)
    fixture.dispatcher.policy_version = 2
    for lease in leases[:2]:
        fixture.dispatcher.submit("w", lease.lease_id, make_trajectories(lease, versions=(0,)))
    for lease in leases[2:]:
        fixture.dispatcher.submit("w", lease.lease_id, make_trajectories(lease, versions=(1,)))
    batch = await fixture.dispatcher.next_batch()
    assert [group.prompt_index for group in batch] == [2, 3]
    assert fixture.ledger.counts().dropped == {"lag_exceeded": 4}
