"""A run that failed: nothing of it holds a GPU, and why it failed is kept."""

from dataclasses import replace

import pytest

from tests.fakes.kubelet.client import ApiStatusError
from tests.fakes.kubernetes.faults import Fault, broken
from tests.fixtures.operator.server_scene import (
    DEPLOYMENT,
    PODS,
    USER_AGENT,
    operator_scene,
    report,
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
async def scene(endpoint):
    async with operator_scene(endpoint) as started:
        yield started


async def crash(scene, times):
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
    await scene.client.merge_patch(f"{PODS}/demo-learner-0/status", {"status": status})


async def condition(scene, kind):
    """Status, reason and message of a condition of the run."""
    conditions = (await scene.run())["status"]["conditions"]
    (found,) = [each for each in conditions if each["type"] == kind]
    return found["status"], found["reason"], found["message"]


async def exists(scene, path):
    """Whether there is such an object."""
    try:
        await scene.client.get(path)
    except ApiStatusError:
        return False
    return True


async def pods(scene):
    """Names of the pods that are not on their way out."""
    found = (await scene.client.get(PODS))["items"]
    names = [body["metadata"] for body in found]
    return [each["name"] for each in names if "deletionTimestamp" not in each]


async def observed_generation(scene):
    """Generation of the spec that the status is about."""
    return (await scene.run())["status"]["observedGeneration"]


async def test_a_run_whose_learner_crashes_frees_all_and_keeps_its_last_lines(scene):
    await scene.create()
    await scene.settle()
    await crash(scene, times=4)
    await scene.settle()
    status, reason, message = await condition(scene, "Failed")
    assert (status, reason) == ("True", "BackoffLimitExceeded")
    assert message == (
        "`spec.failurePolicy.maxLearnerRestarts`: the learner ended 4 times in a row without"
        " progress; 3 restarts are allowed. The last time it ended with exit code 1 (Error):"
        " torch.OutOfMemoryError: CUDA out of memory."
    )
    assert await pods(scene) == []
    assert not await exists(scene, STATEFUL_SET)
    assert not await exists(scene, DEPLOYMENT)
    scene.restart_operator()
    scene.now_s += 3600.0
    await scene.settle()
    assert await condition(scene, "Failed") == (status, reason, message)
    assert (await scene.run())["status"]["learner"]["lastTermination"] == {
        "pod": "demo-learner-0",
        "exitCode": 1,
        "reason": "Error",
        "message": LAST_LINES,
        "finishedTime": "2026-11-20T10:00:05Z",
    }


async def test_a_suspension_frees_a_failed_run_that_was_to_keep_its_pods(scene):
    await scene.create(cleanupPolicy={"onFailed": "RetainWorkloads"})
    await scene.settle()
    await crash(scene, times=4)
    await scene.settle()
    assert "demo-learner-0" in await pods(scene)
    await scene.edit(suspend=True)
    await scene.settle()
    assert await pods(scene) == []
    assert (await condition(scene, "Failed"))[:2] == ("True", "BackoffLimitExceeded")
    assert (await condition(scene, "Suspended"))[0] == "True"


async def test_a_failure_tells_what_was_in_the_way_when_its_pods_are_gone(scene):
    await scene.create(activeDeadlineSeconds=60)
    await scene.settle()
    for pod in await pods(scene):
        await scene.place(pod)
    await crash(scene, times=1)
    await scene.settle()
    scene.now_s += 61.0
    await scene.settle()
    _, reason, message = await condition(scene, "Failed")
    assert reason == "DeadlineExceeded"
    assert "LearnerReady (CrashLoopBackOff): pod demo-learner-0, container learner:" in message
    assert message.endswith("CUDA out of memory.")
    events = (await scene.client.get(EVENTS))["items"]
    told = {event["message"] for event in events if event["type"] == "Warning"}
    assert f"Failed: {message}" in told


async def test_time_in_a_queue_is_no_part_of_the_start(scene):
    gates = {"template": {"spec": {"schedulingGates": [{"name": "queue.test.dev/waits"}]}}}
    await scene.create(startupDeadlineSeconds=60, learner=gates)
    await scene.settle()
    scene.now_s += 3600.0
    await scene.settle()
    assert (await condition(scene, "Failed"))[0] == "False"
    await scene.client.merge_patch(f"{PODS}/demo-learner-0", {"spec": {"schedulingGates": []}})
    for pod in await pods(scene):
        await scene.place(pod)
    await scene.settle()
    scene.now_s += 59.0
    await scene.settle()
    assert (await condition(scene, "Failed"))[0] == "False"
    scene.now_s += 2.0
    await scene.settle()
    assert (await condition(scene, "Failed"))[:2] == ("True", "StartupDeadlineExceeded")


async def test_an_edit_of_a_failed_run_tries_it_again_with_a_fresh_learner(scene):
    await scene.create(cleanupPolicy={"onFailed": "RetainWorkloads"})
    await scene.settle()
    await crash(scene, times=4)
    await scene.settle()
    before = await scene.client.get(f"{PODS}/demo-learner-0")
    await scene.edit(failurePolicy={"maxLearnerRestarts": 5})
    await scene.settle()
    assert (await condition(scene, "Failed"))[:2] == ("False", "NotFailed")
    after = await scene.client.get(f"{PODS}/demo-learner-0")
    assert after["metadata"]["uid"] != before["metadata"]["uid"]


async def test_a_learner_that_gave_up_does_not_fail_the_attempt_after_it(scene):
    await scene.create(cleanupPolicy={"onFailed": "RetainWorkloads"})
    await scene.settle()
    await scene.place("demo-learner-0")  # its kubelet takes its time to end it
    scene.lines.says = replace(report(RunPhase.FAILED), failure="It gave up.")
    await scene.settle()
    assert await condition(scene, "Failed") == ("True", "LearnerFailed", "It gave up.")
    await scene.edit(steps=20)
    await scene.settle()
    assert (await condition(scene, "Failed"))[:2] == ("False", "NotFailed")
    assert "demo-learner-0" not in await pods(scene)
    await scene.client.delete(f"{PODS}/demo-learner-0", {"gracePeriodSeconds": 0})
    scene.lines.says = scene.lines.says.aged(1.0)  # until the new one answers
    scene.now_s += 1.0
    await scene.settle()
    assert "demo-learner-0" in await pods(scene)
    assert (await condition(scene, "Failed"))[:2] == ("False", "NotFailed")


async def test_a_suspended_failed_run_is_tried_again_when_it_goes_on(scene):
    await scene.create()
    await scene.settle()
    await crash(scene, times=4)
    await scene.settle()
    await scene.edit(suspend=True)
    await scene.settle()
    assert (await condition(scene, "Failed"))[0] == "True"
    await scene.edit(suspend=False)
    await scene.settle()
    assert (await condition(scene, "Failed"))[0] == "False"
    assert "demo-learner-0" in await pods(scene)


async def test_an_operator_that_dies_while_it_tries_a_run_again_is_made_up_for():
    async with operator_scene() as scene:
        await scene.create(cleanupPolicy={"onFailed": "RetainWorkloads"})
        await scene.settle()
        await scene.place("demo-learner-0")
        scene.lines.says = report(RunPhase.FAILED)
        await scene.settle()
        await scene.edit(steps=20)
        fault = Fault(error=broken(), verb="delete", resource="pods", user_agent=USER_AGENT)
        scene.server.faults.add(fault)
        assert (await scene.look()).error
        assert (await condition(scene, "Failed"))[0] == "True"
        scene.restart_operator()
        await scene.settle()
        assert (await condition(scene, "Failed"))[0] == "False"
        assert "demo-learner-0" not in await pods(scene)


async def test_trouble_that_holds_up_a_new_attempt_is_told_beside_the_old_failure():
    async with operator_scene() as scene:
        await scene.create()
        await scene.settle()
        await crash(scene, times=4)
        await scene.settle()
        failed, generation = await condition(scene, "Failed"), await observed_generation(scene)
        fault = Fault(error=broken(), verb="patch", resource="services", times=None)
        scene.server.faults.add(fault)
        await scene.edit(steps=20)
        assert (await scene.look()).error
        assert await condition(scene, "Failed") == failed
        assert await observed_generation(scene) == generation
        status, reason, message = await condition(scene, "Ready")
        assert (status, reason) == ("False", "ApplyFailed")
        assert "scripted" in message
        events = (await scene.client.get(EVENTS))["items"]
        assert f"Ready: {message}" in {each["message"] for each in events}
        await scene.settle()
        assert (await condition(scene, "Failed"))[:2] == ("False", "NotFailed")
        assert "demo-learner-0" in await pods(scene)
