"""A learner is told to end in good order, and waited for, before its workers are taken away."""

from dataclasses import replace

import grpc
import pytest

from tests.fakes.kubernetes.faults import Effect, Fault
from tests.fixtures.operator.server_scene import RUN, USER_AGENT, operator_scene, report
from vcpo.wire.phase import RunPhase
from vcpo.wire.v1 import control_pb2, control_pb2_grpc, work_pb2
from vcpo_operator.signals.client import LearnerCommandError, LearnerConnections

DRAIN_S = 90
LEARNER = "/apis/apps/v1/namespaces/default/statefulsets/demo-learner"


@pytest.fixture
async def scene(endpoint):
    """A run whose learner trains."""
    async with operator_scene(endpoint) as started:
        await training(started)
        yield started


async def training(scene):
    await scene.create(learner={"drainSeconds": DRAIN_S})
    await scene.settle()
    scene.lines.says = report()
    await scene.settle()


def deliver(scene):
    """Let what is under way come in."""
    signals = replace(scene.lines.says.signals, in_flight=0)
    scene.lines.says = replace(scene.lines.says, signals=signals)


async def at_work(scene):
    """Replicas of the learner and of its workers."""
    learner = await scene.client.get(LEARNER)
    return learner["spec"]["replicas"], await scene.replicas()


async def test_a_suspended_run_is_drained_once_and_comes_to_rest(scene):
    await scene.edit(suspend=True)
    await scene.settle()
    assert scene.lines.drains == ["the run is suspended"]
    assert await at_work(scene) == (0, 0)


async def test_nothing_is_taken_away_while_trajectories_are_in_flight(scene):
    scene.lines.left_over = 3
    await scene.edit(suspend=True)
    outcome = await scene.settle()
    assert await at_work(scene) == (1, 1)
    assert outcome.requeue_after_s == 1.0
    deliver(scene)
    await scene.settle()
    assert await at_work(scene) == (0, 0)
    assert "drainTime" not in (await scene.run())["status"]


async def test_the_wait_ends_with_the_learners_time(scene):
    scene.lines.left_over = 3
    await scene.edit(suspend=True)
    began_s = int(scene.now_s)
    await scene.settle()
    scene.now_s = began_s + DRAIN_S - 0.25
    outcome = await scene.look()
    assert (outcome.requeue_after_s, await at_work(scene)) == (0.25, (1, 1))
    scene.now_s = began_s + DRAIN_S
    await scene.settle()
    assert await at_work(scene) == (0, 0)


async def test_an_operator_that_comes_later_goes_on_with_the_wait(scene):
    scene.lines.left_over = 3
    await scene.edit(suspend=True)
    await scene.settle()
    scene.now_s += DRAIN_S / 2
    scene.restart_operator()
    await scene.settle()
    assert await at_work(scene) == (1, 1)
    scene.now_s += DRAIN_S / 2
    scene.restart_operator()
    await scene.settle()
    assert await at_work(scene) == (0, 0)
    assert len(scene.lines.drains) == 1


async def test_a_learner_that_is_gone_keeps_no_run_from_its_rest(scene):
    scene.lines.says = replace(scene.lines.says.aged(1.0), is_silent=True)
    await scene.edit(suspend=True)
    await scene.settle()
    assert scene.lines.drains == []
    assert await at_work(scene) == (0, 0)


async def test_a_learner_that_dies_while_it_drains_keeps_no_run_from_its_rest(scene):
    scene.lines.left_over = 3
    await scene.edit(suspend=True)
    await scene.settle()
    scene.lines.says = replace(scene.lines.says.aged(1.0), is_silent=True)
    await scene.settle()
    assert await at_work(scene) == (0, 0)


async def test_a_learner_that_takes_no_order_keeps_its_workers_for_its_time_only(
    scene, monkeypatch
):
    async def refuse(key, reason):
        raise LearnerCommandError("the learner took no drain: not implemented")

    monkeypatch.setattr(scene.lines, "drain", refuse)
    await scene.edit(suspend=True)
    outcome = await scene.settle()
    assert not outcome.error
    scene.now_s += DRAIN_S
    await scene.settle()
    assert await at_work(scene) == (0, 0)


async def test_a_run_that_goes_on_while_its_learner_drains_keeps_its_workers(scene):
    scene.lines.left_over = 3
    await scene.edit(suspend=True)
    await scene.settle()
    await scene.edit(suspend=False)
    await scene.settle()
    deliver(scene)
    await scene.settle()
    assert await at_work(scene) == (1, 1)
    assert "drainTime" not in (await scene.run())["status"]


async def test_a_run_out_of_time_is_drained_before_its_workers_go(scene):
    scene.lines.left_over = 3
    await scene.edit(activeDeadlineSeconds=60)
    scene.now_s += 61.0
    await scene.settle()
    assert len(scene.lines.drains) == 1
    assert "activeDeadlineSeconds" in scene.lines.drains[0]
    assert "deployments/demo-rollout-main" in await scene.objects()
    deliver(scene)
    await scene.settle()
    assert "deployments/demo-rollout-main" not in await scene.objects()


async def test_a_complete_run_has_ended_by_itself(scene):
    scene.lines.says = report(RunPhase.COMPLETE)
    await scene.settle()
    assert scene.lines.drains == []


async def test_a_run_that_is_deleted_is_drained_once_while_it_is_still_there():
    async with operator_scene() as scene:
        await training(scene)
        await scene.client.merge_patch(RUN, {"metadata": {"finalizers": ["test.dev/slow"]}})
        await scene.client.delete(RUN)
        await scene.look()
        await scene.look()
        assert scene.lines.drains == ["the run is deleted"]


class Learner(control_pb2_grpc.ControlServiceServicer):
    """A learner that trains until it is told to end, with three trajectories under way."""

    def __init__(self):
        self.phase = work_pb2.RUN_PHASE_RUNNING

    async def GetSignals(self, request, context):  # noqa: N802 - gRPC's name
        counts = control_pb2.TrajectoryCounts(leased=3, in_flight=3)
        return control_pb2.Signals(
            phase=self.phase, on_policy_ess_ratio=0.8, batch_trajectories=16, trajectories=counts
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


async def test_a_run_suspended_just_after_its_learner_was_asked_is_drained_as_well(scene, learner):
    servicer, address = learner
    scene.lines = LearnerConnections(clock=lambda: scene.now_s, address_of=lambda _: address)
    scene.restart_operator()
    await scene.settle()
    scene.now_s += 0.25
    await scene.edit(suspend=True)
    await scene.settle()
    assert servicer.phase == work_pb2.RUN_PHASE_DRAINING
    assert await at_work(scene) == (1, 1)
    await scene.lines.close()


async def rest(fault=None):
    """A life that ends in a suspension: the calls for that, and what is left."""
    async with operator_scene() as scene:
        await training(scene)
        begun = calls(scene)
        if fault is not None:
            scene.server.faults.add(fault)
        scene.lines.left_over = 3
        await scene.edit(suspend=True)
        await scene.settle()
        assert await at_work(scene) == (1, 1)
        deliver(scene)
        await scene.rest()
        assert "the run is suspended" in scene.lines.drains
        return calls(scene) - begun, await scene.objects()


def calls(scene):
    return sum(each.user_agent == USER_AGENT for each in scene.server.recorder)


async def test_killed_at_any_call_of_a_rest_the_operator_still_waits_and_ends_there():
    num_calls, state = await rest()
    assert num_calls >= 5
    for position in range(num_calls):
        fault = Fault(effect=Effect.LOSE_REPLY, after=position, times=1, user_agent=USER_AGENT)
        assert (await rest(fault))[1] == state, f"killed at call {position}"
