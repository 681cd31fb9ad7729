"""Why a run does not work, where only controllers and kubelets know it: named in its conditions.

A real server has no kubelet here; what it would say is said for it.
"""

import pytest

from tests.fixtures.operator.operator import PODS, operator_fixture


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


async def test_the_reason_of_a_run_whose_image_cannot_be_pulled_is_the_cause(operator):
    await operator.create()
    await operator.settle()
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    container = {"name": "learner", "ready": False, "restartCount": 0, "state": waiting}
    status = {"phase": "Pending", "containerStatuses": [container]}
    await operator.client.merge_patch(f"{PODS}/demo-learner-0/status", {"status": status})
    await operator.settle()
    assert (await operator.run())["status"]["reason"] == "ImagePullBackOff"
    assert (await operator.condition("Ready"))[1] == "Initializing"


async def test_a_learner_that_is_evicted_says_who_evicts_it_and_its_run_does_not_fail(operator):
    await operator.train()
    operator.connections.signals = None
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    target |= {"message": "preempting for a pod"}
    await operator.schedule("demo-learner-0")
    path = f"{PODS}/demo-learner-0"
    await operator.client.merge_patch(f"{path}/status", {"status": {"conditions": [target]}})
    await operator.client.delete(path)
    await operator.settle()
    told = ("False", "PreemptionByScheduler", "pod demo-learner-0: preempting for a pod")
    assert await operator.condition("LearnerReady") == told
    run = (await operator.run())["status"]
    assert (run["reason"], run["learner"]["restarts"]) == ("PreemptionByScheduler", 0)
    told_of = {each["reason"]: each["type"] for each in await operator.events()}
    assert told_of["PreemptionByScheduler"] == "Normal"
    assert (await operator.condition("Failed"))[0] == "False"


async def test_a_learner_s_pod_that_no_kubelet_ends_has_lost_its_node(operator):
    await operator.create(learner={"drainSeconds": 1})
    await operator.settle()
    await operator.schedule("demo-learner-0")
    await operator.client.delete(f"{PODS}/demo-learner-0")
    operator.now_s += 3600.0
    await operator.settle()
    _, reason, message = await operator.condition("LearnerReady")
    assert reason == "NodeLost"
    assert message.startswith("pod demo-learner-0: its node node-0 does not answer")
    told_of = {each["reason"]: each["type"] for each in await operator.events()}
    assert told_of["NodeLost"] == "Warning"
