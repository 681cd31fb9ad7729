"""With over-provisioning the first responses are used; the others are interrupted and kept."""

from tests.fixtures.learner.dispatcher import (
    dispatcher_fixture,
    make_partial_response,
    make_trajectories,
    work_request,
)

# 2 prompts of 2 trajectories a step, lag limit 1: 8 trajectories can be used before the first step.
SECTIONS = {
    "steps": 100,
    "batch": {"promptsPerStep": 2, "trajectoriesPerPrompt": 2, "overProvisionRatio": 2.0},
}


async def take_leases(fixture, **request):
    return await fixture.dispatcher.lease(work_request(**request), wait_s=0)


def submit(fixture, leases):
    for lease in leases:
        fixture.dispatcher.submit("w", lease.lease_id, make_trajectories(lease))


async def test_more_is_granted_than_can_be_used_in_time():
    assert len(await take_leases(dispatcher_fixture())) == 4
    assert len(await take_leases(dispatcher_fixture(**SECTIONS))) == 6


async def test_a_lease_that_cannot_be_used_in_time_is_preempted_and_none_before():
    fixture = dispatcher_fixture(**SECTIONS)
    leases = await take_leases(fixture)
    submit(fixture, leases[:2])
    # 4 accepted of the 8 that can be used: 4 and 4 more may be in flight, and 8 are.
    assert fixture.ledger.preempted_leases("w") == []
    submit(fixture, leases[2:3])
    assert await fixture.dispatcher.next_batch()
    # 6 accepted: 2 and 2 more may be in flight, and 6 are.
    assert fixture.ledger.preempted_leases("w") == [leases[5].lease_id]
    assert await take_leases(fixture) == []


async def test_an_interrupted_response_is_resumed_after_the_step():
    fixture = dispatcher_fixture(**SECTIONS)
    leases = await take_leases(fixture)
    submit(fixture, leases[:3])
    await fixture.dispatcher.next_batch()
    partial = make_partial_response(0, 0)
    fixture.dispatcher.release("w", [leases[5].lease_id], [partial])
    assert fixture.ledger.counts().dropped == {"surplus": 2}
    fixture.dispatcher.policy_version = 1
    resumed, *fresh = await take_leases(fixture, held=1)
    assert (resumed.prompt_index, resumed.partial_responses) == (5, (partial,))
    assert all(lease.partial_responses == () for lease in fresh)
    # 6 accepted of 12: 6 and 4 more may be in flight, and 4 were.
    assert len(fresh) == 2


async def test_a_complete_group_whose_turn_comes_too_late_takes_no_place_of_others():
    fixture = dispatcher_fixture(**SECTIONS)
    # Six groups of version 0 at lag limit 1: the steps at versions 0 and 1 take four of them.
    submit(fixture, await take_leases(fixture))
    assert await take_leases(fixture) == []
    assert fixture.ledger.counts().dropped == {"lag_exceeded": 4}
    assert await fixture.dispatcher.next_batch()
    fixture.dispatcher.policy_version = 1
    # 8 accepted of 12: 4 and 4 more may be in flight, at once.
    assert len(await take_leases(fixture, held=1)) == 4
