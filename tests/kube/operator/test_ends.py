"""The end of a run: its learner drains, its pods go, and its conditions keep the reason."""

from dataclasses import replace

import pytest

from tests.fakes.kubernetes.faults import Effect, Fault, broken
from tests.fixtures.operator.operator import (
    LAST_LINES,
    PODS,
    RUN,
    USER_AGENT,
    operator_fixture,
    signals,
)
from vcpo.wire.phase import RunPhase

DRAIN_S = 90
LEARNER = "/apis/apps/v1/namespaces/default/statefulsets/demo-learner"


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


def deliver(operator):
    """Let what is under way come in."""
    operator.connections.signals = replace(operator.connections.signals, in_flight=0)


async def at_work(operator):
    """Replicas of the learner and of its workers."""
    learner = await operator.client.get(LEARNER)
    return learner["spec"]["replicas"], await operator.replicas()


async def test_a_suspended_run_keeps_its_workers_until_nothing_is_in_flight(operator):
    await operator.train(learner={"drainSeconds": DRAIN_S})
    operator.connections.in_flight_after_drain = 3
    await operator.edit(suspend=True)
    outcome = await operator.settle()
    assert operator.connections.drains == ["the run is suspended"]
    assert await at_work(operator) == (1, 1)
    assert outcome.requeue_after_s == 1.0
    deliver(operator)
    await operator.settle()
    assert await at_work(operator) == (0, 0)
    assert "drainTime" not in (await operator.run())["status"]


async def test_a_run_that_is_deleted_is_drained_once_while_it_is_still_there():
    async with operator_fixture() as operator:
        await operator.train()
        await operator.client.merge_patch(RUN, {"metadata": {"finalizers": ["test.dev/slow"]}})
        await operator.client.delete(RUN)
        await operator.reconcile()
        await operator.reconcile()
        assert operator.connections.drains == ["the run is deleted"]


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
    async with operator_fixture() as operator:
        await operator.train(learner={"drainSeconds": DRAIN_S})
        held, now_s = operator.server.api.copy(), operator.now_s
    num_calls, state = await suspend_and_drain(held, now_s)
    assert num_calls >= 5
    for position in range(num_calls):
        fault = Fault(effect=Effect.LOSE_REPLY, after=position, times=1, user_agent=USER_AGENT)
        found = await suspend_and_drain(held, now_s, fault)
        assert found[1] == state, f"killed at call {position}"


async def test_a_run_whose_learner_crashes_frees_all_and_keeps_its_last_lines(operator):
    await operator.create()
    await operator.settle()
    await operator.crash_learner(times=4)
    await operator.settle()
    status, reason, message = await operator.condition("Failed")
    assert (status, reason) == ("True", "BackoffLimitExceeded")
    assert message == (
        "`spec.failurePolicy.maxLearnerRestarts`: the learner ended 4 times in a row without"
        " progress; 3 restarts are allowed. The last time it ended with exit code 1 (Error):"
        " torch.OutOfMemoryError: CUDA out of memory."
    )
    assert set(await operator.objects()) <= {
        "vcporuns/demo",
        "persistentvolumeclaims/demo-learner",
        "secrets/demo-keys",
        "secrets/demo-tls",
    }
    operator.restart_operator()
    operator.now_s += 3600.0
    await operator.settle()
    assert await operator.condition("Failed") == (status, reason, message)
    assert (await operator.run())["status"]["learner"]["lastTermination"] == {
        "pod": "demo-learner-0",
        "exitCode": 1,
        "reason": "Error",
        "message": LAST_LINES,
        "finishedTime": "2026-11-20T10:00:05Z",
    }


async def test_time_in_a_queue_is_no_part_of_the_start(operator):
    gates = {"template": {"spec": {"schedulingGates": [{"name": "queue.test.dev/waits"}]}}}
    await operator.create(startupDeadlineSeconds=60, learner=gates)
    await operator.settle()
    operator.now_s += 3600.0
    await operator.settle()
    assert (await operator.condition("Failed"))[0] == "False"
    await operator.client.merge_patch(f"{PODS}/demo-learner-0", {"spec": {"schedulingGates": []}})
    for pod in await operator.pods():
        await operator.schedule(pod)
    await operator.settle()
    operator.now_s += 59.0
    await operator.settle()
    assert (await operator.condition("Failed"))[0] == "False"
    operator.now_s += 2.0
    await operator.settle()
    assert (await operator.condition("Failed"))[:2] == ("True", "StartupDeadlineExceeded")


async def test_an_edit_of_a_failed_run_tries_it_again_with_a_fresh_learner(operator):
    await operator.create()
    await operator.settle()
    operator.connections.signals = replace(signals(RunPhase.FAILED), failure="It gave up.")
    await operator.settle()
    assert await operator.condition("Failed") == ("True", "LearnerFailed", "It gave up.")
    await operator.edit(steps=20)
    # The signals are not fresh until the new learner answers.
    operator.connections.signals = operator.connections.signals.at_age(1.0)
    operator.now_s += 1.0
    await operator.settle()
    assert "demo-learner-0" in await operator.pods()
    assert (await operator.condition("Failed"))[:2] == ("False", "NotFailed")


async def test_trouble_that_holds_up_a_new_attempt_is_reported_beside_the_old_failure():
    async with operator_fixture() as operator:
        await operator.create()
        await operator.settle()
        await operator.crash_learner(times=4)
        await operator.settle()
        failed = await operator.condition("Failed")
        generation = (await operator.run())["status"]["observedGeneration"]
        fault = Fault(error=broken(), verb="patch", resource="services", times=None)
        operator.server.faults.add(fault)
        await operator.edit(steps=20)
        assert (await operator.reconcile()).error
        assert await operator.condition("Failed") == failed
        assert (await operator.run())["status"]["observedGeneration"] == generation
        status, reason, message = await operator.condition("Ready")
        assert (status, reason) == ("False", "ApplyFailed")
        assert "scripted" in message
        await operator.settle()
        assert (await operator.condition("Failed"))[:2] == ("False", "NotFailed")
        assert "demo-learner-0" in await operator.pods()
