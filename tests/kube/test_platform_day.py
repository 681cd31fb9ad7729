"""A platform team's days: what an upgrade, an edit or a mistake does to the pods of runs.

Pods become ready because a test says so; nothing trains. `python -m tests.e2e.cluster --day` runs
these tests and adds up the numbers that they record, each of which must be 0.
"""

import dataclasses

import pytest

from tests.fakes.kubelet.client import ApiStatusError
from tests.fixtures.operator.operator import (
    DEFAULTS,
    DEPLOYMENT,
    KEY,
    PODS,
    RUN,
    RUNS,
    operator_fixture,
    run_body,
    signals,
)
from vcpo.wire.phase import RunPhase
from vcpo_operator.decisions.snapshot import LEARNER_PATIENCE_S
from vcpo_operator.decisions.stalled import PATIENCE_S
from vcpo_operator.decisions.status_model import rfc3339
from vcpo_operator.names import RunKey

EVENTS = "/api/v1/namespaces/default/events"
CONFIG = "/api/v1/namespaces/default/configmaps/demo-config"
JOB = "/apis/batch/v1/namespaces/default/jobs/demo-model"
CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"
CLAIM = "/api/v1/namespaces/default/persistentvolumeclaims/demo-learner"
READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
UPGRADED = dataclasses.replace(
    DEFAULTS,
    learner_image="learner:2",
    pod_environment={"VCPO_LOG_FORMAT": "json"},
    scrape_annotations=False,
)
OTHER = RunKey("default", "other")
ON_GPUS = [{"name": "main", "engine": "vllm", "minReplicas": 1, "maxReplicas": 3}]


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


@pytest.fixture
async def alone():
    """An operator on the fake server; a real one never settles where no pod may be made."""
    async with operator_fixture() as started:
        yield started


async def train(operator, key=KEY, **spec):
    """Create a run and let all its pods start."""
    await operator.client.create(RUNS, run_body(key.name, **spec))
    await operator.settle(key)
    await start_pods(operator)
    operator.connections.signals = signals()
    await operator.settle(key)


async def start_pods(operator):
    for pod in (await operator.client.get(PODS))["items"]:
        await operator.client.merge_patch(
            f"{PODS}/{pod['metadata']['name']}/status", {"status": READY}
        )


async def pods(operator, run=KEY.name):
    """Uid of each pod of a run, by name; and image."""
    listed = (await operator.client.get(PODS))["items"]
    return {
        each["metadata"]["uid"]: each["spec"]["containers"][0]["image"]
        for each in listed
        if each["metadata"]["labels"]["vcpo.dev/run"] == run
    }


async def condition(operator, kind, run=RUN):
    conditions = (await operator.client.get(run))["status"]["conditions"]
    (found,) = [each for each in conditions if each["type"] == kind]
    return found["status"], found["reason"], found["message"]


async def claimed(operator):
    return (await operator.client.get(CLAIM))["spec"]["resources"]["requests"]["storage"]


async def events(operator, reason):
    listed = (await operator.client.get(EVENTS))["items"]
    of_runs = [each for each in listed if each["involvedObject"]["kind"] == "VCPORun"]
    return [each["message"] for each in of_runs if each["reason"] == reason]


async def leave(operator, pod, reason, message):
    """Let somebody take a pod from its node: it terminates, and its status says why."""
    target = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    await operator.schedule(pod)
    path = f"{PODS}/{pod}"
    await operator.client.merge_patch(f"{path}/status", {"status": {"conditions": [target]}})
    await operator.client.delete(path)


async def test_an_upgraded_operator_replaces_no_pod_and_says_what_waits(operator, record_property):
    await train(operator)
    before, file = await pods(operator), (await operator.client.get(CONFIG))["data"]
    revision = (await operator.run())["status"]["revision"]
    operator.restart_operator(UPGRADED)
    await operator.settle()
    record_property("runs_restarted_by_upgrade", int(await pods(operator) != before))
    assert await pods(operator) == before
    assert (await operator.client.get(CONFIG))["data"] == file
    status, reason, message = await condition(operator, "UpToDate")
    assert (status, reason) == ("False", "RevisionPending")
    assert 'containers[learner].image: "learner:1" -> "learner:2"' in message
    assert "`upgradePolicy` 'OnRestart'" in message
    run = await operator.run()
    assert run["status"]["revision"] == revision != run["status"]["pendingRevision"]
    assert await condition(operator, "Ready") == ("True", "Training", "The run trains.")
    assert [each.startswith("UpToDate:") for each in await events(operator, reason)] == [True]


async def test_a_rolled_back_upgrade_leaves_nothing_that_waits(operator):
    await train(operator)
    before = await pods(operator)
    operator.restart_operator(UPGRADED)
    await operator.settle()
    operator.restart_operator(DEFAULTS)
    await operator.settle()
    assert await pods(operator) == before
    assert (await condition(operator, "UpToDate"))[:2] == ("True", "Current")
    assert "pendingRevision" not in (await operator.run())["status"]


async def test_a_learner_whose_pod_is_evicted_starts_again_as_the_upgraded_operator_says(operator):
    await train(operator)
    operator.restart_operator(UPGRADED)
    await operator.settle()
    await operator.edit(suspend=True)
    operator.connections.signals = None
    await operator.settle()
    await operator.edit(suspend=False)
    await operator.settle()
    images = set((await pods(operator)).values())
    assert images == {"learner:2", "rollout:1"}
    assert (await condition(operator, "UpToDate"))[:2] == ("True", "Current")
    (message,) = await events(operator, "PodsReplaced")
    assert message.startswith("The operator builds other pods now: ")


async def test_a_run_that_never_upgrades_keeps_its_pods_when_it_resumes(operator):
    await train(operator, upgradePolicy="Never")
    operator.restart_operator(UPGRADED)
    await operator.edit(suspend=True)
    operator.connections.signals = None
    await operator.settle()
    await operator.edit(suspend=False)
    await operator.settle()
    assert set((await pods(operator)).values()) == {"learner:1", "rollout:1"}


async def test_an_edit_of_the_pods_replaces_them_and_the_event_names_the_field(operator):
    await train(operator)
    before = await pods(operator)
    await operator.edit(learner={"threads": 3})
    await operator.settle()
    assert not set(before) & set(await pods(operator))
    (message,) = await events(operator, "PodsReplaced")
    assert message.startswith("The run was edited: spec.learner.threads: nothing -> 3.")


async def test_runs_that_recreate_upgrade_one_after_another(operator):
    for key in (KEY, OTHER):
        await train(operator, key, upgradePolicy="Recreate")
    operator.restart_operator(UPGRADED)
    for key in (KEY, OTHER):
        await operator.settle(key)
    upgraded = [set((await pods(operator, key.name)).values()) for key in (KEY, OTHER)]
    assert upgraded == [{"learner:2", "rollout:1"}, {"learner:1", "rollout:1"}]
    assert (await condition(operator, "UpToDate", f"{RUNS}/other"))[1] == "RevisionPending"
    await start_pods(operator)
    for key in (KEY, OTHER):
        await operator.settle(key)
    assert "learner:2" in (await pods(operator, "other")).values()


async def test_more_steps_replace_no_pod_until_the_learner_has_taken_the_old_number(operator):
    await train(operator)
    before = await pods(operator)
    await operator.edit(steps=20)
    await operator.settle()
    assert await pods(operator) == before
    _, reason, message = await condition(operator, "UpToDate")
    assert (reason, "spec.steps: 10 -> 20" in message) == ("RevisionPending", True)
    operator.connections.signals = signals(RunPhase.COMPLETE)
    await operator.reconcile()
    await operator.reconcile()  # the old learner's last word is still the newest that is known
    await operator.settle()
    assert not set(before) & set(await pods(operator))
    assert (await condition(operator, "Complete"))[0] == "False"
    operator.now_s += 2.0
    await start_pods(operator)
    operator.connections.signals = signals(RunPhase.COMPLETE, step=20)
    await operator.settle()
    assert (await condition(operator, "Complete"))[0] == "True"


async def test_more_steps_of_a_falling_learning_rate_replace_the_pods_at_once(operator):
    await train(operator, optimizer={"schedule": "linear"})
    before = await pods(operator)
    await operator.edit(steps=20)
    await operator.settle()
    assert not set(before) & set(await pods(operator))


async def test_the_reason_of_a_run_whose_image_cannot_be_pulled_is_the_cause(operator):
    await operator.create()
    await operator.settle()
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    container = {"name": "learner", "ready": False, "restartCount": 0, "state": waiting}
    status = {"phase": "Pending", "containerStatuses": [container]}
    await operator.client.merge_patch(f"{PODS}/demo-learner-0/status", {"status": status})
    await operator.settle()
    assert (await operator.run())["status"]["reason"] == "ImagePullBackOff"
    assert (await condition(operator, "Ready"))[1] == "Initializing"


async def test_a_run_without_a_cause_has_the_reason_of_ready(operator):
    await operator.create()
    await operator.settle()
    assert (await operator.run())["status"]["reason"] == "Initializing"


async def test_a_claim_that_waits_for_its_volume_is_not_asked_to_grow(operator):
    await operator.create(learner={"checkpointStorageGibibytes": 50})
    await operator.settle()
    await operator.client.merge_patch(f"{CLAIM}/status", {"status": {"phase": "Pending"}})
    await operator.edit(learner={"checkpointStorageGibibytes": 80})
    await operator.settle()
    assert (await condition(operator, "Accepted"))[:2] == ("True", "Accepted")
    assert await claimed(operator) == "50Gi"
    await operator.client.merge_patch(f"{CLAIM}/status", {"status": {"phase": "Bound"}})
    await operator.settle()
    assert await claimed(operator) == "80Gi"


async def test_a_label_that_somebody_changes_is_put_right(operator):
    await operator.create()
    await operator.settle()
    changed = {"metadata": {"labels": {"app.kubernetes.io/managed-by": "me"}}}
    await operator.client.merge_patch(DEPLOYMENT, changed)
    await operator.settle()
    labels = (await operator.client.get(DEPLOYMENT))["metadata"]["labels"]
    assert labels["app.kubernetes.io/managed-by"] == "vcpo-operator"


async def test_a_run_whose_learner_asks_for_no_gpu_says_so(operator):
    await operator.create(model={"name": "m", "sizeBillions": 7.6})
    await operator.settle()
    accepted = await condition(operator, "Accepted")
    assert accepted[:2] == ("True", "Accepted")
    assert "set `learner.gpusPerReplica`" in accepted[2]


async def place_workers(operator):
    """Give each worker a node."""
    for pod in (await operator.client.get(PODS))["items"]:
        if "rollout" in pod["metadata"]["name"]:
            await operator.schedule(pod["metadata"]["name"])


async def test_workers_give_their_machines_back_while_the_learner_gets_none(operator):
    await operator.create()
    await operator.settle()
    await place_workers(operator)
    assert await operator.replicas() == 1
    operator.now_s += LEARNER_PATIENCE_S
    await operator.settle()
    assert await operator.replicas() == 0
    assert (await condition(operator, "RolloutsReady"))[1] == "LearnerCannotStart"
    operator.restart_operator()
    await operator.settle()
    assert await operator.replicas() == 0
    await operator.schedule("demo-learner-0")
    await operator.settle()
    assert await operator.replicas() == 1


@pytest.mark.parametrize(
    ("spec", "are_placed"),
    [({}, False), ({"pods": {"template": {"spec": {"schedulerName": "volcano"}}}}, True)],
)
async def test_workers_that_a_gang_is_waiting_for_stay(operator, spec, are_placed):
    await operator.create(**spec)
    await operator.settle()
    if are_placed:
        await place_workers(operator)
    operator.now_s += LEARNER_PATIENCE_S
    await operator.settle()
    assert await operator.replicas() == 1


async def test_workers_of_a_learner_that_lost_its_node_wait_for_it_a_while(operator):
    await train(operator)
    await place_workers(operator)
    unready = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    await operator.client.merge_patch(f"{PODS}/demo-learner-0/status", unready)
    operator.connections.signals = None
    operator.now_s += LEARNER_PATIENCE_S
    await operator.settle()
    assert await operator.replicas() == 1
    operator.now_s += LEARNER_PATIENCE_S
    await operator.settle()
    assert await operator.replicas() == 0


async def test_a_learner_that_is_evicted_says_who_evicts_it_and_its_run_does_not_fail(operator):
    await train(operator)
    operator.connections.signals = None
    await leave(operator, "demo-learner-0", "PreemptionByScheduler", "preempting for a pod")
    await operator.settle()
    told = ("False", "PreemptionByScheduler", "pod demo-learner-0: preempting for a pod")
    assert await condition(operator, "LearnerReady") == told
    run = (await operator.run())["status"]
    assert (run["reason"], run["learner"]["restarts"]) == ("PreemptionByScheduler", 0)
    listed = (await operator.client.get(EVENTS))["items"]
    assert [each["type"] for each in listed if each["reason"] == told[1]] == ["Normal"]
    assert (await condition(operator, "Failed"))[0] == "False"


async def test_a_worker_whose_spot_node_goes_is_named_with_the_cause(operator):
    await train(operator)
    (name,) = [
        each["metadata"]["name"]
        for each in (await operator.client.get(PODS))["items"]
        if "rollout" in each["metadata"]["name"]
    ]
    status = {
        "phase": "Failed",
        "reason": "Terminated",
        "message": "Pod was terminated in response to imminent node shutdown.",
        "conditions": [{"type": "Ready", "status": "False"}],
    }
    await operator.client.merge_patch(f"{PODS}/{name}/status", {"status": status})
    await operator.settle()
    assert await condition(operator, "RolloutsReady") == (
        "False",
        "Terminated",
        f"pod {name}: Pod was terminated in response to imminent node shutdown.",
    )


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"containers": {"name": "learner"}}, ".containers"),
        ({"tolerations": [{"key": "gpu", "effect": "NoSchdule"}]}, ".tolerations[0].effect"),
        ({"nodeSelectr": {"pool": "gpus"}}, ".nodeSelectr"),
        ({"containers": [{"name": "learner", "resorces": {}}]}, ".containers[0].resorces"),
    ],
)
async def test_a_template_with_a_mistake_is_refused_when_the_run_is_applied(operator, spec, path):
    body = run_body(learner={"template": {"spec": spec}})
    with pytest.raises(ApiStatusError) as refused:  # kubectl asks for strict validation
        await operator.client.create(f"{RUNS}?fieldValidation=Strict", body)
    assert f"spec.learner.template.spec{path}" in str(refused.value)


async def test_a_mistake_deep_in_a_template_is_named_by_the_condition(operator):
    resources = {"name": "learner", "livenessProbe": {"periodSecond": 3}}
    await operator.create(learner={"template": {"spec": {"containers": [resources]}}})
    await operator.settle()
    status, reason, message = await condition(operator, "Accepted")
    assert (status, reason) == ("False", "InvalidSpec")
    assert "livenessProbe.periodSecond: field not declared in schema" in message


async def test_a_template_may_take_a_default_away(operator):
    spec = {"securityContext": {"fsGroup": None}, "imagePullSecrets": [{"name": "registry"}]}
    await operator.create(learner={"template": {"spec": spec}})
    await operator.settle()
    pod = (await operator.client.get(f"{PODS}/demo-learner-0"))["spec"]
    assert "fsGroup" not in pod["securityContext"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]


async def test_a_restarted_operator_keeps_a_cause_that_only_events_tell(alone, record_property):
    operator = alone
    await without_room_for_pods(operator)
    told = await condition(operator, "LearnerReady")
    assert told[1] == "FailedCreate"
    before = await events(operator, "FailedCreate")
    operator.restart_operator()
    await operator.reconcile()
    after = await events(operator, "FailedCreate")
    record_property("flaps", len(after) - len(before))
    assert await condition(operator, "LearnerReady") == told
    assert after == before


async def test_two_operators_without_a_lease_do_not_contradict_each_other(alone, record_property):
    operator = alone
    await without_room_for_pods(operator)
    told, first = await condition(operator, "LearnerReady"), operator.reconciler
    version = (await operator.run())["metadata"]["resourceVersion"]
    operator.restart_operator()
    second = operator.reconciler
    for one in (second, first, second, first):
        operator.reconciler = one
        operator.now_s += 5.0
        await operator.reconcile()
        assert await condition(operator, "LearnerReady") == told
    after = (await operator.run())["metadata"]["resourceVersion"]
    record_property("flaps", int(after != version))
    assert after == version


async def without_room_for_pods(operator):
    """A run whose pods a quota refuses, and whose status says so."""
    quota = {"metadata": {"name": "no-pods"}, "spec": {"hard": {"pods": "0"}}}
    await operator.client.create("/api/v1/namespaces/default/resourcequotas", quota)
    await operator.create()
    await operator.settle()
    operator.now_s += PATIENCE_S
    await operator.settle()


async def test_a_run_that_fails_holds_no_gpu(operator, record_property):
    await train(operator, learner={"gpusPerReplica": 1}, rollouts=ON_GPUS)
    assert await gpus_held(operator) == 2
    operator.connections.signals = signals(RunPhase.FAILED)
    await operator.settle()
    assert (await condition(operator, "Failed"))[:2] == ("True", "LearnerFailed")
    held = await gpus_held(operator)
    record_property("gpus_held_after_failure", held)
    assert held == 0


async def test_an_image_that_cannot_be_pulled_holds_no_gpu_after_its_deadline(
    operator, record_property
):
    await operator.create(learner={"gpusPerReplica": 1}, rollouts=ON_GPUS)
    await operator.settle()
    await operator.schedule("demo-learner-0")
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    container = {"name": "learner", "ready": False, "restartCount": 0, "state": waiting}
    status = {"phase": "Pending", "containerStatuses": [container], **since(operator, "startTime")}
    await operator.client.merge_patch(f"{PODS}/demo-learner-0/status", {"status": status})
    operator.now_s += 899.0
    await operator.settle()
    assert (await condition(operator, "Failed"))[0] == "False"
    operator.now_s += 1.0
    await operator.settle()
    status, reason, message = await condition(operator, "Failed")
    assert (status, reason) == ("True", "PullDeadlineExceeded")
    assert message == (
        "`spec.pullDeadlineSeconds`: pod demo-learner-0 has a node, and no container of it started"
        " within 900 s. ImagePullBackOff: pod demo-learner-0, container learner: no such image"
    )
    # No kubelet ends the pod that has a node.
    await operator.client.delete(f"{PODS}/demo-learner-0", {"gracePeriodSeconds": 0})
    await operator.settle()
    held = await gpus_held(operator)
    record_property("gpus_held_after_failure", held)
    assert held == 0


async def test_downloads_that_hang_give_their_gpus_back_but_for_one_while_others_train(operator):
    await train(
        operator, learner={"gpusPerReplica": 1}, rollouts=[{**ON_GPUS[0], "minReplicas": 3}]
    )
    assert await operator.replicas() == 3
    names = [each["metadata"]["name"] for each in (await operator.client.get(PODS))["items"]]
    for name in sorted(each for each in names if "rollout" in each)[1:]:
        await load(operator, name)
    operator.now_s += 1800.0
    operator.connections.signals = signals()
    await operator.settle()
    assert await operator.replicas() == 2
    status, reason, message = await condition(operator, "RolloutsReady")
    assert (status, reason) == ("False", "LoadDeadlineExceeded")
    assert "`spec.loadDeadlineSeconds`: pod demo-rollout-main-" in message
    assert (await condition(operator, "Failed"))[0] == "False"


async def test_a_run_all_of_whose_workers_hang_while_they_load_fails(operator):
    await operator.create(loadDeadlineSeconds=600)
    await operator.settle()
    for pod in (await operator.client.get(PODS))["items"]:
        if "rollout" in pod["metadata"]["name"]:
            await load(operator, pod["metadata"]["name"])
    operator.now_s += 600.0
    await operator.settle()
    status, reason, message = await condition(operator, "Failed")
    assert (status, reason) == ("True", "LoadDeadlineExceeded")
    assert message.endswith(" did not download and load its model within 600 s.")


async def load(operator, pod):
    """Let a container run and not answer yet, as its kubelet tells it."""
    state = {"running": since(operator, "startedAt")}
    container = {"name": "rollout", "ready": False, "restartCount": 0, "started": False}
    status = {
        "phase": "Running",
        "containerStatuses": [{**container, "state": state}],
        "conditions": [{"type": "Ready", "status": "False"}],
    }
    await operator.client.merge_patch(f"{PODS}/{pod}/status", {"status": status})


async def test_pods_wait_until_a_job_has_the_model_and_then_only_read_it(operator):
    model = {"name": "org/m", "sizeBillions": 7.6, "cache": {}}
    await operator.create(model=model, learner={"gpusPerReplica": 1}, rollouts=ON_GPUS)
    await operator.settle()
    assert await gpus_held(operator) == 0
    claim = (await operator.client.get(f"{CLAIMS}/demo-model"))["spec"]
    assert claim["accessModes"] == ["ReadWriteMany"]
    assert claim["resources"]["requests"]["storage"] == "38Gi"
    told = await condition(operator, "LearnerReady")
    assert told[:2] == ("False", "ModelDownloading")
    assert (await condition(operator, "RolloutsReady"))[:2] == told[:2]
    operator.now_s += 3600.0  # no other deadline acts meanwhile
    await operator.settle()
    await end_download(operator, "Complete")
    assert await gpus_held(operator) == 2
    for pod in (await operator.client.get(PODS))["items"]:
        (container,) = pod["spec"]["containers"]
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "model-cache"]
        assert mount["readOnly"] is True
        assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]


async def test_a_model_that_cannot_be_downloaded_fails_the_run_and_an_edit_tries_again(operator):
    await operator.create(
        model={"name": "org/m", "cache": {"claimName": "models"}},
        cleanupPolicy={"onFailed": "RetainWorkloads"},
    )
    await operator.settle()
    before = (await operator.client.get(JOB))["metadata"]["uid"]
    container = (await operator.client.get(JOB))["spec"]["template"]["spec"]["containers"][0]
    assert "HF_HUB_OFFLINE" not in {each["name"] for each in container["env"]}
    await end_download(operator, "Failed", message="Job has reached the backoff limit")
    status, reason, message = await condition(operator, "Failed")
    assert (status, reason) == ("True", "ModelDownloadFailed")
    assert message == "The model was not downloaded: Job has reached the backoff limit."
    operator.now_s += 60.0
    await operator.edit(pods={"tokenSecretName": "hub"})
    await operator.settle()
    job = await operator.client.get(JOB)
    assert job["metadata"]["uid"] != before
    assert "HF_TOKEN" in str(job["spec"]["template"])
    assert (await condition(operator, "Failed"))[0] == "False"


async def end_download(operator, kind, **told):
    condition = {"type": kind, "status": "True", **told, **since(operator, "lastTransitionTime")}
    await operator.client.merge_patch(f"{JOB}/status", {"status": {"conditions": [condition]}})
    await operator.settle()


def since(operator, field):
    return {field: rfc3339(operator.now_s)}


async def test_a_suspended_run_lends_its_gpus_and_resumes_from_its_volume(operator):
    await train(operator, learner={"gpusPerReplica": 1}, rollouts=ON_GPUS)
    volume = (await operator.client.get(CLAIM))["metadata"]["uid"]
    await operator.edit(suspend=True)
    await operator.reconcile()
    assert operator.connections.drains == ["the run is suspended"]  # it saves first
    operator.connections.signals = None
    await operator.settle()
    assert await gpus_held(operator) == 0
    await operator.edit(suspend=False)
    await operator.settle()
    assert await gpus_held(operator) == 2
    assert (await operator.client.get(CLAIM))["metadata"]["uid"] == volume
    pod = await operator.client.get(f"{PODS}/demo-learner-0")
    assert "--resume" in pod["spec"]["containers"][0]["command"]


async def test_a_deleted_run_leaves_nothing_but_its_volume(operator, record_property):
    await train(operator)
    await operator.client.delete(RUN)
    operator.connections.signals = None
    await operator.settle()
    left = [*await operator.objects(), *(await operator.client.get(PODS))["items"]]
    record_property("orphans", len(left) - 1)
    assert left == ["persistentvolumeclaims/demo-learner"]


async def gpus_held(operator):
    """GPUs that the pods of all runs ask for."""
    containers = [
        pod["spec"]["containers"][0] for pod in (await operator.client.get(PODS))["items"]
    ]
    limits = [each["resources"].get("limits", {}) for each in containers]
    return sum(int(each.get("nvidia.com/gpu", 0)) for each in limits)


async def test_a_queue_sees_learner_and_least_workers_as_one_unit(operator, record_property):
    groups = [
        {"name": "main", "minReplicas": 2, "maxReplicas": 2},
        {"name": "more", "minReplicas": 0, "maxReplicas": 4},
    ]
    await operator.create(pods={"queueName": "gpus"}, rollouts=groups)
    await operator.settle()
    made = [each["metadata"] for each in (await operator.client.get(PODS))["items"]]
    named = [each for each in made if "kueue.x-k8s.io/pod-group-name" in each["labels"]]
    sizes = {each["annotations"]["kueue.x-k8s.io/pod-group-total-count"] for each in named}
    record_property("admitted_as_unit", int(sizes == {"3"} and len(named) == len(made) == 3))
    assert (sizes, len(named), len(made)) == ({"3"}, 3, 3)
