"""A failed run holds no GPU, and its conditions keep the reason."""

from dataclasses import replace

import pytest

from tests.fakes.kubelet.client import ApiStatusError
from tests.fakes.kubernetes.faults import Fault, broken
from tests.fixtures.operator.operator import (
    DEPLOYMENT,
    PODS,
    USER_AGENT,
    operator_fixture,
    signals,
)
from vcpo.wire.phase import RunPhase

EVENTS = "/api/v1/namespaces/default/events"
STATEFUL_SET = "/apis/apps/v1/namespaces/default/statefulsets/demo-learner"
LAST_LINES = "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory."
ENDED = {
    "exitCode": 1,
    "reason": "Error",
    "message": f"{LAST_LINES}\n",
    "startedAt": "2026-11-20T10:00:00Z",
    "finishedAt": "2026-11-20T10:00:05Z",
}


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


async def crash(operator, times):
    """Let the learner's container have ended so many times, as its kubelet tells it."""
    container = {
        "name": "learner",
        "image": "learner:1",
        "imageID": "",
        "ready": False,
        "restartCount": times,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": ENDED},
    }
    status = {"phase": "Running", "containerStatuses": [container]}
    await operator.client.merge_patch(f"{PODS}/demo-learner-0/status", {"status": status})


async def condition(operator, kind):
    """Status, reason and message of a condition of the run."""
    conditions = (await operator.run())["status"]["conditions"]
    (found,) = [each for each in conditions if each["type"] == kind]
    return found["status"], found["reason"], found["message"]


async def exists(operator, path):
    """Whether there is such an object."""
    try:
        await operator.client.get(path)
    except ApiStatusError:
        return False
    return True


async def pods(operator):
    """Names of the pods that are not on their way out."""
    found = (await operator.client.get(PODS))["items"]
    names = [body["metadata"] for body in found]
    return [each["name"] for each in names if "deletionTimestamp" not in each]


async def observed_generation(operator):
    """Generation of the spec that the status is about."""
    return (await operator.run())["status"]["observedGeneration"]


async def test_a_run_whose_learner_crashes_frees_all_and_keeps_its_last_lines(operator):
    await operator.create()
    await operator.settle()
    await crash(operator, times=4)
    await operator.settle()
    status, reason, message = await condition(operator, "Failed")
    assert (status, reason) == ("True", "BackoffLimitExceeded")
    assert message == (
        "`spec.failurePolicy.maxLearnerRestarts`: the learner ended 4 times in a row without"
        " progress; 3 restarts are allowed. The last time it ended with exit code 1 (Error):"
        " torch.OutOfMemoryError: CUDA out of memory."
    )
    assert await pods(operator) == []
    assert not await exists(operator, STATEFUL_SET)
    assert not await exists(operator, DEPLOYMENT)
    operator.restart_operator()
    operator.now_s += 3600.0
    await operator.settle()
    assert await condition(operator, "Failed") == (status, reason, message)
    assert (await operator.run())["status"]["learner"]["lastTermination"] == {
        "pod": "demo-learner-0",
        "exitCode": 1,
        "reason": "Error",
        "message": LAST_LINES,
        "finishedTime": "2026-11-20T10:00:05Z",
    }


async def test_a_suspension_frees_a_failed_run_that_was_to_keep_its_pods(operator):
    await operator.create(cleanupPolicy={"onFailed": "RetainWorkloads"})
    await operator.settle()
    await crash(operator, times=4)
    await operator.settle()
    assert "demo-learner-0" in await pods(operator)
    await operator.edit(suspend=True)
    await operator.settle()
    assert await pods(operator) == []
    assert (await condition(operator, "Failed"))[:2] == ("True", "BackoffLimitExceeded")
    assert (await condition(operator, "Suspended"))[0] == "True"


async def test_a_failure_tells_what_was_in_the_way_when_its_pods_are_gone(operator):
    await operator.create(activeDeadlineSeconds=60)
    await operator.settle()
    for pod in await pods(operator):
        await operator.schedule(pod)
    await crash(operator, times=1)
    await operator.settle()
    operator.now_s += 61.0
    await operator.settle()
    _, reason, message = await condition(operator, "Failed")
    assert reason == "DeadlineExceeded"
    assert "LearnerReady (CrashLoopBackOff): pod demo-learner-0, container learner:" in message
    assert message.endswith("CUDA out of memory.")
    events = (await operator.client.get(EVENTS))["items"]
    told = {event["message"] for event in events if event["type"] == "Warning"}
    assert f"Failed: {message}" in told


async def test_time_in_a_queue_is_no_part_of_the_start(operator):
    gates = {"template": {"spec": {"schedulingGates": [{"name": "queue.test.dev/waits"}]}}}
    await operator.create(startupDeadlineSeconds=60, learner=gates)
    await operator.settle()
    operator.now_s += 3600.0
    await operator.settle()
    assert (await condition(operator, "Failed"))[0] == "False"
    await operator.client.merge_patch(f"{PODS}/demo-learner-0", {"spec": {"schedulingGates": []}})
    await operator.schedule("demo-learner-0")
    await operator.settle()  # its workers come back
    for pod in await pods(operator):
        if pod != "demo-learner-0":
            await operator.schedule(pod)
    await operator.settle()
    operator.now_s += 59.0
    await operator.settle()
    assert (await condition(operator, "Failed"))[0] == "False"
    operator.now_s += 2.0
    await operator.settle()
    assert (await condition(operator, "Failed"))[:2] == ("True", "StartupDeadlineExceeded")


async def test_an_edit_of_a_failed_run_tries_it_again_with_a_fresh_learner(operator):
    await operator.create(cleanupPolicy={"onFailed": "RetainWorkloads"})
    await operator.settle()
    await crash(operator, times=4)
    await operator.settle()
    before = await operator.client.get(f"{PODS}/demo-learner-0")
    await operator.edit(failurePolicy={"maxLearnerRestarts": 5})
    await operator.settle()
    assert (await condition(operator, "Failed"))[:2] == ("False", "NotFailed")
    after = await operator.client.get(f"{PODS}/demo-learner-0")
    assert after["metadata"]["uid"] != before["metadata"]["uid"]


async def test_a_learner_that_gave_up_does_not_fail_the_attempt_after_it(operator):
    await operator.create(cleanupPolicy={"onFailed": "RetainWorkloads"})
    await operator.settle()
    await operator.schedule("demo-learner-0")  # its kubelet takes its time to end it
    operator.connections.signals = replace(signals(RunPhase.FAILED), failure="It gave up.")
    await operator.settle()
    assert await condition(operator, "Failed") == ("True", "LearnerFailed", "It gave up.")
    await operator.edit(steps=20)
    await operator.settle()
    assert (await condition(operator, "Failed"))[:2] == ("False", "NotFailed")
    assert "demo-learner-0" not in await pods(operator)
    await operator.client.delete(f"{PODS}/demo-learner-0", {"gracePeriodSeconds": 0})
    # The signals are not fresh until the new learner answers.
    operator.connections.signals = operator.connections.signals.at_age(1.0)
    operator.now_s += 1.0
    await operator.settle()
    assert "demo-learner-0" in await pods(operator)
    assert (await condition(operator, "Failed"))[:2] == ("False", "NotFailed")


async def test_a_suspended_failed_run_is_tried_again_when_it_goes_on(operator):
    await operator.create()
    await operator.settle()
    await crash(operator, times=4)
    await operator.settle()
    await operator.edit(suspend=True)
    await operator.settle()
    assert (await condition(operator, "Failed"))[0] == "True"
    await operator.edit(suspend=False)
    await operator.settle()
    assert (await condition(operator, "Failed"))[0] == "False"
    assert "demo-learner-0" in await pods(operator)


async def test_an_operator_that_dies_while_it_tries_a_run_again_is_made_up_for():
    async with operator_fixture() as operator:
        await operator.create(cleanupPolicy={"onFailed": "RetainWorkloads"})
        await operator.settle()
        await operator.schedule("demo-learner-0")
        operator.connections.signals = signals(RunPhase.FAILED)
        await operator.settle()
        await operator.edit(steps=20)
        fault = Fault(error=broken(), verb="delete", resource="pods", user_agent=USER_AGENT)
        operator.server.faults.add(fault)
        assert (await operator.reconcile()).error
        assert (await condition(operator, "Failed"))[0] == "True"
        operator.restart_operator()
        await operator.settle()
        assert (await condition(operator, "Failed"))[0] == "False"
        assert "demo-learner-0" not in await pods(operator)


async def test_trouble_that_holds_up_a_new_attempt_is_reported_beside_the_old_failure():
    async with operator_fixture() as operator:
        await operator.create()
        await operator.settle()
        await crash(operator, times=4)
        await operator.settle()
        failed, generation = (
            await condition(operator, "Failed"),
            await observed_generation(operator),
        )
        fault = Fault(error=broken(), verb="patch", resource="services", times=None)
        operator.server.faults.add(fault)
        await operator.edit(steps=20)
        assert (await operator.reconcile()).error
        assert await condition(operator, "Failed") == failed
        assert await observed_generation(operator) == generation
        status, reason, message = await condition(operator, "Ready")
        assert (status, reason) == ("False", "ApplyFailed")
        assert "scripted" in message
        events = (await operator.client.get(EVENTS))["items"]
        assert f"Ready: {message}" in {each["message"] for each in events}
        await operator.settle()
        assert (await condition(operator, "Failed"))[:2] == ("False", "NotFailed")
        assert "demo-learner-0" in await pods(operator)
