"""Workers that hoard leases, hang, or never received a granted lease, at a real dispatcher."""

import asyncio

from tests.fixtures.learner.dispatcher import (
    INCARNATION,
    TIMEOUT_S,
    dispatcher_fixture,
    settle,
    work_request,
)
from vcpo.wire.v1 import control_pb2
from vcpo_learner.ledger.admission import WorkRequest
from vcpo_learner.telemetry.signals import SignalWindow

RUN = {
    "steps": 1000,
    "batch": {"promptsPerStep": 8, "trajectoriesPerPrompt": 2},
    "algorithm": {"maxPolicyLagSteps": 3},
    "rollouts": [{"name": "main", "maxConcurrentSequences": 16}],
}
BUDGET = (3 + 1) * 16


async def take_leases(fixture, worker_id, **request):
    return await fixture.dispatcher.lease(work_request(worker_id=worker_id, **request), wait_s=0)


def num_in_flight(fixture, *workers):
    flights = fixture.dispatcher.ledger.leases.in_flight_by_worker()
    return sum(flights.get(worker, 0) for worker in workers)


async def test_a_worker_holds_what_its_places_are_for_however_much_it_asks_for():
    fixture = dispatcher_fixture(**RUN)
    for _ in range(3):
        await take_leases(fixture, "greedy", room=65_536)
    assert num_in_flight(fixture, "greedy") == 16


async def test_sixteen_that_hoard_leave_half_of_the_work_to_one_that_delivers():
    fixture = dispatcher_fixture(**RUN)
    hoarders = [f"hoarder-{number}" for number in range(16)]
    first, *_ = await take_leases(fixture, "honest", room=2)
    for hoarder in hoarders:
        await take_leases(fixture, hoarder, room=65_536)
    assert fixture.submit(first, worker_id="honest") == ["accepted"] * 2
    fixture.clock.advance(TIMEOUT_S)  # what they hold runs out, and they ask again
    for _ in range(3):
        for hoarder in hoarders:
            await take_leases(fixture, hoarder, room=65_536)
    assert num_in_flight(fixture, *hoarders) <= BUDGET // 2
    await take_leases(fixture, "honest")
    assert num_in_flight(fixture, "honest") == 16


async def test_a_worker_that_let_a_lease_run_out_gets_one_at_a_time_until_it_delivers():
    fixture = dispatcher_fixture(**RUN)
    await take_leases(fixture, "hung")
    fixture.clock.advance(TIMEOUT_S)
    (only,) = await take_leases(fixture, "hung")
    assert await take_leases(fixture, "hung") == []
    fixture.submit(only, worker_id="hung")
    assert len(await take_leases(fixture, "hung")) == 8


async def test_leases_of_a_lost_reply_go_to_others_when_the_worker_asks_again():
    fixture = dispatcher_fixture(**RUN)
    first, *lost = await take_leases(fixture, "w", room=16)
    request = work_request(worker_id="w", room=2)
    known = WorkRequest(
        worker_id="w",
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


async def test_signals_name_a_bounded_number_of_workers_whoever_invents_some():
    fixture = dispatcher_fixture(**RUN)
    await take_leases(fixture, "honest", room=2)
    for number in range(8_214):
        await take_leases(fixture, f"invented-{number}", incarnation="none")
    signals = SignalWindow(
        run_name="run",
        total_steps=3,
        batch_trajectories=16,
        dispatcher=fixture.dispatcher,
        clock=fixture.clock,
    )
    message = signals.message()
    assert isinstance(message, control_pb2.Signals)
    assert len(message.workers) == 2 * 1 + 64


HELD_OUT = {**RUN, "evaluation": {"prompts": 64, "everySteps": 100}}


async def start_evaluation(fixture, step=0):
    round_ = asyncio.create_task(fixture.dispatcher.evaluate(step, exclusive=True))
    await settle()
    return round_


async def test_sixteen_that_hoard_leave_half_of_an_evaluation_to_one_that_delivers():
    fixture = dispatcher_fixture(**HELD_OUT)
    hoarders = [f"hoarder-{number}" for number in range(16)]
    first, *_ = await take_leases(fixture, "honest", room=2)
    fixture.submit(first, worker_id="honest")
    round_ = await start_evaluation(fixture)
    for _ in range(3):
        for hoarder in hoarders:
            await take_leases(fixture, hoarder, room=65_536)
    granted = 0
    while leases := await take_leases(fixture, "honest", room=65_536):
        assert len(leases) <= 16
        for one in leases:
            fixture.submit(one, worker_id="honest")
        granted += len(leases)
    assert granted >= 32
    round_.cancel()


async def test_an_evaluation_ends_though_hoarders_ask_first_whenever_leases_run_out():
    fixture = dispatcher_fixture(**HELD_OUT)
    round_ = await start_evaluation(fixture)
    for _ in range(10):
        for hoarder in range(4):
            await take_leases(fixture, f"hoarder-{hoarder}", room=65_536)
        while leases := await take_leases(fixture, "honest"):
            for one in leases:
                fixture.submit(one, worker_id="honest")
        await settle()
        if round_.done():
            break
        fixture.clock.advance(TIMEOUT_S)
        await settle()
    assert (await asyncio.wait_for(round_, 1)).num_trajectories == 64


async def test_newcomers_share_all_of_the_first_evaluation():
    fixture = dispatcher_fixture(**HELD_OUT)
    round_ = await start_evaluation(fixture)
    shares = [len(await take_leases(fixture, f"worker-{number}", room=16)) for number in range(4)]
    assert shares == [16] * 4
    round_.cancel()


async def test_a_worker_that_let_a_held_out_prompt_run_out_gets_one_at_a_time_until_it_delivers():
    fixture = dispatcher_fixture(**HELD_OUT)
    round_ = await start_evaluation(fixture)
    await take_leases(fixture, "hung")
    fixture.clock.advance(TIMEOUT_S)
    (only,) = await take_leases(fixture, "hung")
    assert await take_leases(fixture, "hung") == []
    fixture.submit(only, worker_id="hung")
    assert len(await take_leases(fixture, "hung")) == 16
    round_.cancel()
