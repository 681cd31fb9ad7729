"""The operator asks a learner to drain and waits for it before it removes the workers."""

from dataclasses import replace

import grpc
import pytest

from tests.fakes.kubernetes.faults import Effect, Fault
from tests.fixtures.operator.operator import RUN, USER_AGENT, operator_fixture, signals
from vcpo.wire.phase import RunPhase
from vcpo.wire.v1 import control_pb2, control_pb2_grpc, work_pb2
from vcpo_operator.signals.client import LearnerCommandError, LearnerConnections

DRAIN_S = 90
LEARNER = "/apis/apps/v1/namespaces/default/statefulsets/demo-learner"


@pytest.fixture
async def operator(endpoint):
    """A run whose learner trains."""
    async with operator_fixture(endpoint) as started:
        await start_training(started)
        yield started


async def start_training(operator):
    await operator.create(learner={"drainSeconds": DRAIN_S})
    await operator.settle()
    operator.connections.signals = signals()
    await operator.settle()


def deliver(operator):
    """Let what is under way come in."""
    operator.connections.signals = replace(operator.connections.signals, in_flight=0)


async def at_work(operator):
    """Replicas of the learner and of its workers."""
    learner = await operator.client.get(LEARNER)
    return learner["spec"]["replicas"], await operator.replicas()


async def test_a_suspended_run_is_drained_once_and_comes_to_rest(operator):
    await operator.edit(suspend=True)
    await operator.settle()
    assert operator.connections.drains == ["the run is suspended"]
    assert await at_work(operator) == (0, 0)


async def test_nothing_is_taken_away_while_trajectories_are_in_flight(operator):
    operator.connections.in_flight_after_drain = 3
    await operator.edit(suspend=True)
    outcome = await operator.settle()
    assert await at_work(operator) == (1, 1)
    assert outcome.requeue_after_s == 1.0
    deliver(operator)
    await operator.settle()
    assert await at_work(operator) == (0, 0)
    assert "drainTime" not in (await operator.run())["status"]


async def test_the_wait_ends_with_the_learners_time(operator):
    operator.connections.in_flight_after_drain = 3
    await operator.edit(suspend=True)
    began_s = int(operator.now_s)
    await operator.settle()
    operator.now_s = began_s + DRAIN_S - 0.25
    outcome = await operator.reconcile()
    assert (outcome.requeue_after_s, await at_work(operator)) == (0.25, (1, 1))
    operator.now_s = began_s + DRAIN_S
    await operator.settle()
    assert await at_work(operator) == (0, 0)


async def test_an_operator_that_comes_later_goes_on_with_the_wait(operator):
    operator.connections.in_flight_after_drain = 3
    await operator.edit(suspend=True)
    await operator.settle()
    operator.now_s += DRAIN_S / 2
    operator.restart_operator()
    await operator.settle()
    assert await at_work(operator) == (1, 1)
    operator.now_s += DRAIN_S / 2
    operator.restart_operator()
    await operator.settle()
    assert await at_work(operator) == (0, 0)
    assert len(operator.connections.drains) == 1


async def test_a_learner_that_is_gone_keeps_no_run_from_its_rest(operator):
    operator.connections.signals = replace(operator.connections.signals.at_age(1.0), is_silent=True)
    await operator.edit(suspend=True)
    await operator.settle()
    assert operator.connections.drains == []
    assert await at_work(operator) == (0, 0)


async def test_a_learner_that_dies_while_it_drains_keeps_no_run_from_its_rest(operator):
    operator.connections.in_flight_after_drain = 3
    await operator.edit(suspend=True)
    await operator.settle()
    operator.connections.signals = replace(operator.connections.signals.at_age(1.0), is_silent=True)
    await operator.settle()
    assert await at_work(operator) == (0, 0)


async def test_a_learner_that_takes_no_order_keeps_its_workers_for_its_time_only(
    operator, monkeypatch
):
    async def refuse(key, reason):
        raise LearnerCommandError("the learner took no drain: not implemented")

    monkeypatch.setattr(operator.connections, "drain", refuse)
    await operator.edit(suspend=True)
    outcome = await operator.settle()
    assert not outcome.error
    operator.now_s += DRAIN_S
    await operator.settle()
    assert await at_work(operator) == (0, 0)


async def test_a_run_that_goes_on_while_its_learner_drains_keeps_its_workers(operator):
    operator.connections.in_flight_after_drain = 3
    await operator.edit(suspend=True)
    await operator.settle()
    await operator.edit(suspend=False)
    await operator.settle()
    deliver(operator)
    await operator.settle()
    assert await at_work(operator) == (1, 1)
    assert "drainTime" not in (await operator.run())["status"]


async def test_a_run_out_of_time_is_drained_before_its_workers_go(operator):
    operator.connections.in_flight_after_drain = 3
    await operator.edit(activeDeadlineSeconds=60)
    operator.now_s += 61.0
    await operator.settle()
    assert len(operator.connections.drains) == 1
    assert "activeDeadlineSeconds" in operator.connections.drains[0]
    assert "deployments/demo-rollout-main" in await operator.objects()
    deliver(operator)
    await operator.settle()
    assert "deployments/demo-rollout-main" not in await operator.objects()


async def test_a_complete_run_has_ended_by_itself(operator):
    operator.connections.signals = signals(RunPhase.COMPLETE)
    await operator.settle()
    assert operator.connections.drains == []


async def test_a_run_that_is_deleted_is_drained_once_while_it_is_still_there():
    async with operator_fixture() as operator:
        await start_training(operator)
        await operator.client.merge_patch(RUN, {"metadata": {"finalizers": ["test.dev/slow"]}})
        await operator.client.delete(RUN)
        await operator.reconcile()
        await operator.reconcile()
        assert operator.connections.drains == ["the run is deleted"]


class Learner(control_pb2_grpc.ControlServiceServicer):
    """A learner that trains until it is told to end, with three trajectories under way."""

    def __init__(self):
        self.phase = work_pb2.RUN_PHASE_RUNNING

    async def GetSignals(self, request, context):  # noqa: N802 - gRPC's name
        counts = control_pb2.TrajectoryCounts(leased=3, in_flight=3)
        return control_pb2.Signals(
            phase=self.phase,
            on_policy_ess_ratio=0.8,
            batch_trajectories=16,
            lag_limit_steps=8,
            trajectories=counts,
        )

    async def SetThrottle(self, request, context):  # noqa: N802 - gRPC's name
        return control_pb2.SetThrottleResponse()

    async def Drain(self, request, context):  # noqa: N802 - gRPC's name
        self.phase = work_pb2.RUN_PHASE_DRAINING
        return control_pb2.DrainResponse(phase=self.phase)


@pytest.fixture
async def learner():
    """A learner behind a real connection, and its address."""
    server, servicer = grpc.aio.server(), Learner()
    control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_a_run_suspended_just_after_its_learner_was_asked_is_drained_as_well(
    operator, learner
):
    servicer, address = learner
    operator.connections = LearnerConnections(
        clock=lambda: operator.now_s, address_of=lambda _: address
    )
    operator.restart_operator()
    await operator.edit(pods={"transport": "PlainText"})
    await operator.settle()
    operator.now_s += 0.25
    await operator.edit(suspend=True)
    await operator.settle()
    assert servicer.phase == work_pb2.RUN_PHASE_DRAINING
    assert await at_work(operator) == (1, 1)
    await operator.connections.close()


async def trained():
    """What a server holds whose run's learner trains."""
    async with operator_fixture() as operator:
        await start_training(operator)
        return operator.server.api.copy(), operator.now_s


async def suspend_and_drain(held, now_s, fault=None):
    """Number of the operator's calls from suspension to the end, and the objects left."""
    async with operator_fixture(held=held.copy()) as operator:
        operator.now_s, operator.connections.signals = now_s, signals()
        if fault is not None:
            operator.server.faults.add(fault)
        operator.connections.in_flight_after_drain = 3
        await operator.edit(suspend=True)
        await operator.settle()
        assert await at_work(operator) == (1, 1)
        deliver(operator)
        await operator.settle_with_progress()
        assert "the run is suspended" in operator.connections.drains
        calls = [each for each in operator.server.recorder if each.user_agent == USER_AGENT]
        return len(calls), await operator.objects()


async def test_an_operator_killed_at_any_call_while_it_drains_still_reaches_the_same_end():
    held, now_s = await trained()
    num_calls, state = await suspend_and_drain(held, now_s)
    assert num_calls >= 5
    for position in range(num_calls):
        fault = Fault(effect=Effect.LOSE_REPLY, after=position, times=1, user_agent=USER_AGENT)
        found = await suspend_and_drain(held, now_s, fault)
        assert found[1] == state, f"killed at call {position}"
