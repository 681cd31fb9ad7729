"""Why a run does not start, where only controllers and kubelets know it: named in its conditions.

On both servers. A real one has no kubelet here; what it would say is said for it.
"""

import asyncio

import pytest

from tests.fakes.kubernetes.errors import forbidden
from tests.fakes.kubernetes.faults import Fault
from tests.fixtures.operator.server_scene import DEPLOYMENT, KEY, PODS, operator_scene
from vcpo_operator.decisions.stalled import PATIENCE_S, REREAD_S

QUOTAS = "/api/v1/namespaces/default/resourcequotas"
EVENTS = "/api/v1/namespaces/default/events"
PATIENT_S = 30.0
POLL_S = 0.05


@pytest.fixture
async def scene(endpoint):
    async with operator_scene(endpoint) as started:
        yield started


@pytest.fixture
async def full(scene):
    """The scene in a namespace whose quota leaves no room for a pod."""
    quota = {"metadata": {"name": "no-pods"}, "spec": {"hard": {"pods": "0"}}}
    await scene.client.create(QUOTAS, quota)
    yield scene
    await scene.client.delete(f"{QUOTAS}/no-pods")


async def condition(scene, kind):
    """Status, reason and message of a condition of the run."""
    conditions = (await scene.run()).get("status", {}).get("conditions", ())
    found = next((each for each in conditions if each["type"] == kind), None)
    return None if found is None else (found["status"], found["reason"], found["message"])


async def look_until(scene, kind, reason):
    """Look, as long as it takes controllers to speak, until a condition has the reason."""
    async with asyncio.timeout(PATIENT_S):
        while True:
            await scene.world.refresh()
            await scene.operator.reconcile(KEY)
            found = await condition(scene, kind)
            if found is not None and found[1] == reason:
                return found
            scene.now_s += PATIENCE_S
            await asyncio.sleep(POLL_S)


async def warnings_of_the_run(scene):
    """Reasons and messages of the Warnings about the run."""
    events = (await scene.client.get(EVENTS))["items"]
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


async def test_a_volume_that_is_missing_is_named_with_the_kubelet_s_sentence(scene):
    await scene.create()
    await scene.settle()
    pod = await scene.client.get(f"{PODS}/demo-learner-0")
    await scene.place("demo-learner-0")
    await tell(scene, pod, "FailedScheduling", "0/1 nodes are available")
    told = 'MountVolume.SetUp failed for volume "task" : configmap "task" not found'
    await tell(scene, pod, "FailedMount", told)
    found = await look_until(scene, "LearnerReady", "FailedMount")
    assert found == ("False", "FailedMount", f"pod demo-learner-0: {told}")


async def test_a_volume_that_came_in_the_end_is_no_cause_while_the_image_is_pulled(scene):
    await scene.create()
    await scene.settle()
    pod = await scene.client.get(f"{PODS}/demo-learner-0")
    await scene.place("demo-learner-0")
    await tell(scene, pod, "FailedMount", "failed to sync configmap cache: timed out")
    await look_until(scene, "LearnerReady", "FailedMount")
    pulling = {"type": "Normal", "lastTimestamp": "2026-11-20T10:00:02Z"}
    await tell(scene, pod, "Pulling", 'Pulling image "learner:1"', **pulling)
    found = await look_until(scene, "LearnerReady", "PodPending")
    assert found == ("False", "PodPending", "The learner's pod is not ready yet.")


async def tell(scene, pod, reason, message, **changes):
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
    await scene.client.create(EVENTS, event)


async def test_a_start_that_takes_its_time_is_asked_about_seldom():
    async with operator_scene() as scene:
        await scene.create()
        await scene.settle()
        await scene.place("demo-learner-0")
        for _ in range(61):
            await scene.look()
            scene.now_s += 1.0
        reads = [each for each in scene.server.recorder if each.resource == "events"]
        asked = [each for each in reads if each.verb == "list"]
        assert len(asked) == 1 + int((60.0 - PATIENCE_S) // REREAD_S)


async def test_an_operator_that_may_not_read_events_works_all_the_same():
    async with operator_scene() as scene:
        scene.server.faults.add(Fault(error=forbidden("events", "", "no"), verb="list", times=None))
        quota = {"metadata": {"name": "no-pods"}, "spec": {"hard": {"pods": "0"}}}
        await scene.client.create(QUOTAS, quota)
        await scene.create()
        await scene.settle()
        scene.now_s += PATIENCE_S
        assert not (await scene.look()).error
        assert (await scene.client.get(DEPLOYMENT))["spec"]["replicas"] == 1


async def test_a_learner_whose_node_is_lost_reads_so_and_is_warned_of(scene):
    await scene.create()
    await scene.settle()
    await scene.place("demo-learner-0")
    container = {"name": "learner", "image": "l", "imageID": "", "ready": True, "restartCount": 0}
    container |= {"state": {"running": {"startedAt": "2026-11-20T10:00:00Z"}}}
    status = {"phase": "Running", "containerStatuses": [container]}
    # What a node controller leaves: nobody knows of the containers any more.
    status["conditions"] = [{"type": "Ready", "status": "False"}]
    await scene.client.merge_patch(f"{PODS}/demo-learner-0/status", {"status": status})
    _, _, message = await look_until(scene, "LearnerReady", "NodeLost")
    assert message.startswith("pod demo-learner-0: its node node-0 does not answer")
    assert ("NodeLost", f"LearnerReady: {message}") in await warnings_of_the_run(scene)


async def test_a_learner_s_pod_that_no_kubelet_ends_has_lost_its_node(scene):
    await scene.create(learner={"drainSeconds": 1})
    await scene.settle()
    await scene.place("demo-learner-0")
    await scene.client.delete(f"{PODS}/demo-learner-0")
    _, _, message = await look_until(scene, "LearnerReady", "NodeLost")
    assert message.startswith("pod demo-learner-0: its node node-0 does not answer")
