"""A run that failed: nothing of it holds a GPU, and why it failed is kept."""

import pytest

from tests.kube.kubelet_client import ApiStatusError
from tests.kube.operator_scene import DEPLOYMENT, PODS, operator_scene

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


async def test_a_run_whose_learner_crashes_frees_all_and_keeps_its_last_lines(scene):
    await scene.create()
    await scene.settle()
    await crash(scene, times=4)
    await scene.settle()
    status, reason, message = await condition(scene, "Failed")
    assert (status, reason) == ("True", "BackoffLimitExceeded")
    assert message == (
        "The learner ended 4 times in a row without progress; 3 are allowed."
        f" The last time with exit code 1 (Error): {LAST_LINES}"
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
