"""Workers that never received a granted lease, or ask again, at a real dispatcher."""

import asyncio

from tests.fixtures.learner.dispatcher import (
    INCARNATION,
    dispatcher_fixture,
    settle,
    work_request,
)
from vcpo_learner.ledger.admission import WorkRequest

RUN = {
    "steps": 1000,
    "batch": {"promptsPerStep": 8, "trajectoriesPerPrompt": 2},
    "algorithm": {"maxPolicyLagSteps": 3},
    "rollouts": [{"name": "main", "maxConcurrentSequences": 16}],
}


async def take_leases(fixture, worker_id, **request):
    return await fixture.dispatcher.lease(work_request(worker_id=worker_id, **request), wait_s=0)


def num_in_flight(fixture, *workers):
    flights = fixture.dispatcher.ledger.leases.in_flight_by_worker()
    return sum(flights.get(worker, 0) for worker in workers)


async def test_leases_of_a_lost_reply_go_to_others_when_the_worker_asks_again():
    fixture = dispatcher_fixture(**RUN)
    first, *lost = await take_leases(fixture, "w", room=16)
    request = work_request(worker_id="w", room=2)
    known = WorkRequest(
        worker_id="w",
        process_id="w",
        rollout_group="main",
        incarnation=INCARNATION,
        held_policy_version=0,
        max_trajectories=request.max_trajectories,
        held_lease_ids=frozenset({first.lease_id}),
    )
    (again,) = await fixture.dispatcher.lease(known, wait_s=0)
    assert again.prompt_index == lost[0].prompt_index
    assert num_in_flight(fixture, "w") == 4


async def test_a_request_is_given_up_when_its_worker_asks_again():
    fixture = dispatcher_fixture(**RUN)
    for worker in ("a", "b", "c", "d"):
        await take_leases(fixture, worker)
    waiting = [
        asyncio.create_task(fixture.dispatcher.lease(work_request(worker_id="w"), wait_s=30))
        for _ in range(3)
    ]
    await settle()
    fixture.dispatcher.notify()
    await settle()
    assert [task.done() for task in waiting] == [True, True, False]
    waiting[-1].cancel()
