"""A worker that is set aside: its work is granted to others, and nothing of it is trained on."""

from __future__ import annotations

import asyncio

import pytest

from tests.fixtures.learner.dispatcher import dispatcher_fixture, make_trajectories, work_request
from vcpo.records.reasons import DropReason, SetAsideCause

WHY = SetAsideCause.MISMATCH, "0.4 nats a token off"


@pytest.fixture
def fixture():
    """A run whose batch has 4 prompts of 2 trajectories."""
    return dispatcher_fixture(batch={"promptsPerStep": 4, "trajectoriesPerPrompt": 2})


async def lease(fixture, worker_id, num_prompts):
    request = work_request(worker_id=worker_id, room=2 * num_prompts)
    return await fixture.dispatcher.lease(request, wait_s=0.0)


async def test_what_it_holds_and_what_it_brought_goes_to_other_workers_first(fixture):
    brought, held = await lease(fixture, "bad", 2)
    (of_other,) = await lease(fixture, "good", 1)
    fixture.submit(brought, worker_id="bad")
    fixture.submit(of_other, worker_id="good")
    fixture.dispatcher.set_aside("bad", *WHY)
    assert fixture.ledger.leases.held_by("bad") == []
    kept = [group.lease_id for group in fixture.ledger.buffer.groups()]
    assert kept == [of_other.lease_id]
    again = await lease(fixture, "good", 2)
    prompts = {each.prompt_index for each in again}
    assert prompts == {held.prompt_index, brought.prompt_index}
    counts = fixture.ledger.counts()
    counts.check()
    assert counts.dropped == {DropReason.WORKER_SET_ASIDE: 4}


async def test_a_group_that_others_completed_goes_with_what_it_brought_before_a_restart(fixture):
    (begun,) = await lease(fixture, "bad", 1)
    first, _ = make_trajectories(begun)
    fixture.dispatcher.submit("bad", begun.lease_id, [first])
    fixture.ledger.restart()
    (rest,) = await lease(fixture, "good", 1)
    fixture.submit(rest, worker_id="good")
    assert fixture.ledger.buffer.num_trajectories == 2
    fixture.dispatcher.set_aside("bad", *WHY)
    assert fixture.ledger.buffer.num_trajectories == 0


async def test_a_lease_is_sampled_with_the_same_seed_however_many_workers_lose_it(fixture):
    (held,) = await lease(fixture, "bad-0", 1)
    for number in range(3):
        fixture.dispatcher.set_aside(f"bad-{number}", *WHY)
        (again,) = await lease(fixture, f"bad-{number + 1}", 1)
        assert again.seed(7) == held.seed(7)


async def test_it_gets_no_more_work_not_even_what_it_waits_for(fixture):
    # Each worker may hold what admission leaves: 8 trajectories a step, and a lag of 1.
    await lease(fixture, "good", 100)
    waiting = asyncio.create_task(
        fixture.dispatcher.lease(work_request(worker_id="bad"), wait_s=30.0)
    )
    await asyncio.sleep(0)
    fixture.dispatcher.set_aside("bad", *WHY)
    assert await waiting == []
    fixture.dispatcher.release("good", ())
    assert [each.worker_id for each in fixture.dispatcher.registry.workers()] == []
    assert await lease(fixture, "good", 1) != []


async def test_held_out_prompts_that_it_holds_are_granted_again():
    fixture = dispatcher_fixture(evaluation={"prompts": 1, "everySteps": 100})
    round_ = asyncio.create_task(fixture.dispatcher.evaluate(0, exclusive=True))
    await asyncio.sleep(0)
    await lease(fixture, "bad", 1)
    fixture.dispatcher.set_aside("bad", *WHY)
    (again,) = await lease(fixture, "good", 1)
    fixture.submit(again, worker_id="good")
    result = await round_
    assert result is not None
    assert result.num_trajectories == 1


async def test_it_is_told_once_with_its_group_and_the_reason(fixture):
    await lease(fixture, "bad", 1)
    fixture.clock.advance(5.0)
    for _ in range(2):
        fixture.dispatcher.set_aside("bad", *WHY)
    assert fixture.events == [("WorkerSetAside", "bad: mismatch: 0.4 nats a token off")]
    assert fixture.dispatcher.registry.num_set_aside == {SetAsideCause.MISMATCH: 1}
    (told,) = fixture.dispatcher.registry.latest_set_aside
    assert (told.worker_id, told.rollout_group, told.time_s) == ("bad", "main", 1005.0)


async def test_another_process_under_its_name_begins_anew(fixture):
    await lease(fixture, "bad", 1)
    fixture.dispatcher.set_aside("bad", *WHY)
    request = work_request(worker_id="bad", process_id="later", room=2)
    assert await fixture.dispatcher.lease(request, wait_s=0.0)
    assert fixture.dispatcher.registry.set_aside_process("later") is None
    assert fixture.dispatcher.registry.set_aside_process("bad").message == WHY[1]
