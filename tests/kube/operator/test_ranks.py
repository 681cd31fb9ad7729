"""A learner of several pods: when one of them ends, the operator replaces all of them."""

import pytest

from tests.fixtures.operator.operator import PODS, signals

EVENTS = "/api/v1/namespaces/default/events"
READY = {"type": "Ready", "status": "True"}
ENDED = {
    "exitCode": 1,
    "reason": "Error",
    "message": "ValueError: the batch is bad",
    "finishedAt": "2026-01-01T00:00:00Z",
}


@pytest.fixture
async def operator(operator):
    """An operator whose run has a learner of two pods that have met."""
    await operator.create(learner={"replicas": 2})
    await operator.settle()
    for index in range(2):
        await show(operator, index, restarts=0)
    operator.connections.signals = signals()
    await operator.settle()
    return operator


async def show(operator, index, *, restarts, ended=None):
    """Play the kubelet of one of the learner's pods."""
    container = {"name": "learner", "ready": True, "restartCount": restarts, "image": "i"}
    container |= {"imageID": "i", "state": {"running": {}}}
    container |= {"lastState": {"terminated": ended}} if ended else {}
    status = {"phase": "Running", "conditions": [READY], "containerStatuses": [container]}
    await operator.client.merge_patch(f"{PODS}/demo-learner-{index}/status", {"status": status})


async def learner_pods(operator):
    """Uids of the learner's pods by name."""
    pods = (await operator.client.get(PODS))["items"]
    return {
        body["metadata"]["name"]: body["metadata"]["uid"]
        for body in pods
        if "demo-learner" in body["metadata"]["name"]
    }


async def restart_events(operator):
    events = (await operator.client.get(EVENTS))["items"]
    return [event["message"] for event in events if event["reason"] == "RanksRestarted"]


@pytest.mark.parametrize("restarts_operator", [False, True])
async def test_one_that_ends_is_named_and_all_start_anew_as_one_restart(
    operator, restarts_operator
):
    before = await learner_pods(operator)
    await show(operator, 1, restarts=1, ended=ENDED)
    await operator.reconcile()
    if restarts_operator:
        operator.restart_operator()
    await operator.settle()
    after = await learner_pods(operator)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    learner = (await operator.run())["status"]["learner"]
    assert learner["restarts"] == 1
    assert "group" not in learner
    (event,) = await restart_events(operator)
    assert event == (
        "Pod demo-learner-1 ended with exit code 1 (Error): ValueError: the batch is bad. All ranks"
        " start again together, from the last checkpoint."
    )
    for index in range(2):
        await show(operator, index, restarts=0)
    await operator.settle()
    assert await learner_pods(operator) == after
    assert set((await operator.run())["status"]["learner"]["group"]) == set(after.values())
