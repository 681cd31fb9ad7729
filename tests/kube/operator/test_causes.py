"""Why a run does not start, where only controllers and kubelets know it: named in its conditions.

On both servers. A real one has no kubelet here; what it would say is said for it.
"""

import asyncio

import pytest

from tests.fakes.kubernetes.errors import forbidden
from tests.fakes.kubernetes.faults import Fault
from tests.fixtures.operator.operator import DEPLOYMENT, PODS, operator_fixture
from vcpo_operator.decisions.stalled import PATIENCE_S, REREAD_S

QUOTAS = "/api/v1/namespaces/default/resourcequotas"
EVENTS = "/api/v1/namespaces/default/events"
PATIENT_S = 30.0
POLL_S = 0.05


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


@pytest.fixture
async def full(operator):
    """The operator in a namespace whose quota leaves no room for a pod."""
    quota = {"metadata": {"name": "no-pods"}, "spec": {"hard": {"pods": "0"}}}
    await operator.client.create(QUOTAS, quota)
    yield operator
    await operator.client.delete(f"{QUOTAS}/no-pods")


async def condition(operator, kind):
    """Status, reason and message of a condition of the run."""
    conditions = (await operator.run()).get("status", {}).get("conditions", ())
    found = next((each for each in conditions if each["type"] == kind), None)
    return None if found is None else (found["status"], found["reason"], found["message"])


async def look_until(operator, kind, reason):
    """Look, as long as it takes controllers to speak, until a condition has the reason."""
    async with asyncio.timeout(PATIENT_S):
        while True:
            await operator.backend.refresh()
            await operator.reconciler.reconcile(operator.key_of())
            found = await condition(operator, kind)
            if found is not None and found[1] == reason:
                return found
            operator.now_s += PATIENCE_S
            await asyncio.sleep(POLL_S)


async def warnings_of_the_run(operator):
    """Reasons and messages of the Warnings about the run."""
    events = (await operator.client.get(EVENTS))["items"]
    return [
        (event["reason"], event["message"])
        for event in events
        if event["type"] == "Warning" and event["involvedObject"]["kind"] == "VCPORun"
    ]


async def test_a_learner_that_a_quota_refuses_is_named_with_the_server_s_sentence(full):
    await full.create()
    status, _, message = await look_until(full, "LearnerReady", "FailedCreate")
    assert status == "False"
    assert message.startswith("StatefulSet demo-learner: ")
    assert 'pods "demo-learner-0" is forbidden: ' in message
    (told,) = [each for each in await warnings_of_the_run(full) if "StatefulSet" in each[1]]
    assert told == ("FailedCreate", f"LearnerReady: {message}")


async def test_workers_that_a_quota_refuses_are_named_with_the_server_s_sentence(full):
    await full.create()
    status, _, message = await look_until(full, "RolloutsReady", "FailedCreate")
    assert status == "False"
    assert message.startswith("Deployment demo-rollout-main: ")
    assert 'pods "demo-rollout-main-' in message
    assert " is forbidden: " in message


async def test_what_was_refused_is_forgotten_once_it_is_made(full):
    await full.create()
    await look_until(full, "LearnerReady", "FailedCreate")
    await full.client.merge_patch(f"{QUOTAS}/no-pods", {"spec": {"hard": {"pods": "9"}}})
    status, _, message = await look_until(full, "LearnerReady", "PodPending")
    assert (status, message) == ("False", "The learner's pod is not ready yet.")


async def test_a_volume_that_is_missing_is_named_with_the_kubelet_s_sentence(operator):
    await operator.create()
    await operator.settle()
    pod = await operator.client.get(f"{PODS}/demo-learner-0")
    await operator.schedule("demo-learner-0")
    await tell(operator, pod, "FailedScheduling", "0/1 nodes are available")
    told = 'MountVolume.SetUp failed for volume "task" : configmap "task" not found'
    await tell(operator, pod, "FailedMount", told)
    found = await look_until(operator, "LearnerReady", "FailedMount")
    assert found == ("False", "FailedMount", f"pod demo-learner-0: {told}")


async def test_a_volume_that_came_in_the_end_is_no_cause_while_the_image_is_pulled(operator):
    await operator.create()
    await operator.settle()
    pod = await operator.client.get(f"{PODS}/demo-learner-0")
    await operator.schedule("demo-learner-0")
    await tell(operator, pod, "FailedMount", "failed to sync configmap cache: timed out")
    await look_until(operator, "LearnerReady", "FailedMount")
    pulling = {"type": "Normal", "lastTimestamp": "2026-11-20T10:00:02Z"}
    await tell(operator, pod, "Pulling", 'Pulling image "learner:1"', **pulling)
    found = await look_until(operator, "LearnerReady", "PodPending")
    assert found == ("False", "PodPending", "The learner's pod is not ready yet.")


async def tell(operator, pod, reason, message, **changes):
    """Post an event about a pod, as a kubelet does: a Warning unless changed."""
    metadata = pod["metadata"]
    involved = {"apiVersion": "v1", "kind": "Pod"}
    involved |= {name: metadata[name] for name in ("name", "namespace", "uid")}
    event = {
        "metadata": {"name": f"{metadata['name']}.{reason.lower()}"},
        "involvedObject": involved,
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": "2026-11-20T10:00:00Z",
        "source": {"component": "kubelet"},
        **changes,
    }
    await operator.client.create(EVENTS, event)


async def test_a_start_that_takes_its_time_is_asked_about_seldom():
    async with operator_fixture() as operator:
        await operator.create()
        await operator.settle()
        await operator.schedule("demo-learner-0")
        for _ in range(61):
            await operator.reconcile()
            operator.now_s += 1.0
        reads = [each for each in operator.server.recorder if each.resource == "events"]
        asked = [each for each in reads if each.verb == "list"]
        assert len(asked) == 1 + int((60.0 - PATIENCE_S) // REREAD_S)


async def test_an_operator_that_may_not_read_events_works_all_the_same():
    async with operator_fixture() as operator:
        operator.server.faults.add(
            Fault(error=forbidden("events", "", "no"), verb="list", times=None)
        )
        quota = {"metadata": {"name": "no-pods"}, "spec": {"hard": {"pods": "0"}}}
        await operator.client.create(QUOTAS, quota)
        await operator.create()
        await operator.settle()
        operator.now_s += PATIENCE_S
        assert not (await operator.reconcile()).error
        assert (await operator.client.get(DEPLOYMENT))["spec"]["replicas"] == 1


async def test_a_learner_whose_node_is_lost_reads_so_and_is_warned_of(operator):
    await operator.create()
    await operator.settle()
    await operator.schedule("demo-learner-0")
    container = {"name": "learner", "image": "l", "imageID": "", "ready": True, "restartCount": 0}
    container |= {"state": {"running": {"startedAt": "2026-11-20T10:00:00Z"}}}
    status = {"phase": "Running", "containerStatuses": [container]}
    # What a node controller leaves: nobody knows of the containers any more.
    status["conditions"] = [{"type": "Ready", "status": "False"}]
    await operator.client.merge_patch(f"{PODS}/demo-learner-0/status", {"status": status})
    _, _, message = await look_until(operator, "LearnerReady", "NodeLost")
    assert message.startswith("pod demo-learner-0: its node node-0 does not answer")
    assert ("NodeLost", f"LearnerReady: {message}") in await warnings_of_the_run(operator)


async def test_a_learner_s_pod_that_no_kubelet_ends_has_lost_its_node(operator):
    await operator.create(learner={"drainSeconds": 1})
    await operator.settle()
    await operator.schedule("demo-learner-0")
    await operator.client.delete(f"{PODS}/demo-learner-0")
    _, _, message = await look_until(operator, "LearnerReady", "NodeLost")
    assert message.startswith("pod demo-learner-0: its node node-0 does not answer")
