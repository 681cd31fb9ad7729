"""Built-in kinds: defaults, refusals and controllers, on the fake and on a real server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.kubernetes.client import Client
from tests.fixtures.kubernetes.objects import deployment, stateful_set

Body = dict[str, Any]


def _apps(namespace: str, plural: str) -> str:
    return f"/apis/apps/v1{namespace}/{plural}"


async def test_a_deployment_gets_the_server_s_defaults(api: Client, namespace: str) -> None:
    created = await api.post(_apps(namespace, "deployments"), deployment("web"))
    spec = created.body["spec"]
    rolling = {"maxUnavailable": "25%", "maxSurge": "25%"}
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": rolling}
    assert spec["template"]["spec"]["restartPolicy"] == "Always"
    assert spec["template"]["spec"]["containers"][0]["imagePullPolicy"] == "IfNotPresent"


async def test_a_selector_must_match_its_template(api: Client, namespace: str) -> None:
    body = deployment("web") | {}
    body["spec"]["selector"] = {"matchLabels": {"app": "other"}}
    assert (await api.post(_apps(namespace, "deployments"), body)).code == 422


async def test_a_selector_cannot_change(api: Client, namespace: str) -> None:
    path = _apps(namespace, "deployments")
    await api.post(path, deployment("web"))
    labels = {"app": "web", "more": "1"}
    spec = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}}}
    assert (await api.patch(f"{path}/web", {"spec": spec})).code == 422


async def test_two_containers_cannot_share_a_name(api: Client, namespace: str) -> None:
    body = deployment("web")
    body["spec"]["template"]["spec"]["containers"] *= 2
    assert (await api.post(_apps(namespace, "deployments"), body)).code == 422


async def test_a_mount_needs_its_volume(api: Client, namespace: str) -> None:
    body = deployment("web")
    container = body["spec"]["template"]["spec"]["containers"][0]
    container["volumeMounts"] = [{"name": "absent", "mountPath": "/x"}]
    assert (await api.post(_apps(namespace, "deployments"), body)).code == 422


@pytest.mark.parametrize(
    "spec", [{"serviceName": "other"}, {"podManagementPolicy": "Parallel"}], ids=str
)
async def test_most_of_a_stateful_set_cannot_change(
    api: Client, namespace: str, spec: Body
) -> None:
    path = _apps(namespace, "statefulsets")
    await api.post(path, stateful_set("db"))
    assert (await api.patch(f"{path}/db", {"spec": spec})).code == 422


async def test_scale_sets_the_replicas_and_knows_the_selector(api: Client, namespace: str) -> None:
    path = _apps(namespace, "deployments")
    await api.post(path, deployment("web"))
    scale = (await api.patch(f"{path}/web/scale", {"spec": {"replicas": 3}})).body
    assert (scale["kind"], scale["spec"], scale["status"]["selector"]) == (
        "Scale",
        {"replicas": 3},
        "app=web",
    )
    assert (await api.get(f"{path}/web")).body["spec"]["replicas"] == 3


async def test_a_headless_service_stays_without_address(api: Client, namespace: str) -> None:
    spec = {"clusterIP": "None", "ports": [{"port": 80}]}
    created = await api.post(
        f"/api/v1{namespace}/services", {"metadata": {"name": "web"}, "spec": spec}
    )
    assert created.body["spec"]["clusterIP"] == "None"


async def test_a_budget_takes_one_bound_only(api: Client, namespace: str) -> None:
    spec = {"minAvailable": 1, "maxUnavailable": 1, "selector": {}}
    body = {"metadata": {"name": "web"}, "spec": spec}
    assert (await api.post(f"/apis/policy/v1{namespace}/poddisruptionbudgets", body)).code == 422


async def test_a_deployment_makes_a_replica_set_that_makes_pods(
    api: Client, namespace: str, with_controllers: None
) -> None:
    await api.post(_apps(namespace, "deployments"), deployment("web", replicas=1))
    pod = await api.until(f"/api/v1{namespace}/pods", lambda body: True)
    owner = pod["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["controller"]) == ("ReplicaSet", True)
    assert pod["status"]["phase"] == "Pending"
    sets = (await api.get(_apps(namespace, "replicasets"))).body["items"]
    assert [s["metadata"]["ownerReferences"][0]["name"] for s in sets] == ["web"]


async def test_a_stateful_set_in_parallel_makes_all_pods_at_once(
    api: Client, namespace: str, with_controllers: None
) -> None:
    body = stateful_set("db", replicas=2, podManagementPolicy="Parallel")
    await api.post(_apps(namespace, "statefulsets"), body)
    pods = f"/api/v1{namespace}/pods"
    await api.until(pods, lambda body: body["metadata"]["name"] == "db-1")
    assert (await api.get(pods)).names == ["db-0", "db-1"]


async def test_a_controller_says_which_generation_it_has_seen(
    api: Client, namespace: str, with_controllers: None
) -> None:
    path = _apps(namespace, "statefulsets")
    await api.post(path, stateful_set("db"))
    await api.patch(f"{path}/db", {"spec": {"replicas": 2}})
    await api.until(path, lambda body: body["status"].get("observedGeneration") == 2)


async def test_a_placed_pod_stays_until_the_kubelet_lets_it_go(api: Client, namespace: str) -> None:
    pods = f"/api/v1{namespace}/pods"
    containers = [{"name": "main", "image": "app:1"}]
    await api.post(pods, {"metadata": {"name": "p"}, "spec": {"containers": containers}})
    binding = {"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "node-0"}}
    assert (await api.post(f"{pods}/p/binding", binding)).code == 201
    await api.delete(f"{pods}/p")
    assert (await api.get(f"{pods}/p")).metadata["deletionGracePeriodSeconds"] == 30
    await api.delete(f"{pods}/p", gracePeriodSeconds="0")
    assert (await api.get(f"{pods}/p")).code == 404


async def test_a_pod_that_runs_nowhere_goes_at_once(api: Client, namespace: str) -> None:
    pods = f"/api/v1{namespace}/pods"
    containers = [{"name": "main", "image": "app:1"}]
    await api.post(pods, {"metadata": {"name": "p"}, "spec": {"containers": containers}})
    await api.delete(f"{pods}/p")
    assert (await api.get(f"{pods}/p")).code == 404


async def test_a_pod_beyond_a_quota_is_refused_and_its_controllers_say_so(
    api: Client, namespace: str, with_controllers: None
) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    await api.post(f"/api/v1{namespace}/resourcequotas", quota)
    await api.post(_apps(namespace, "deployments"), deployment("web", replicas=1))
    await api.post(_apps(namespace, "statefulsets"), stateful_set("db"))
    failed = await api.until(
        _apps(namespace, "deployments"), lambda body: bool(_replica_failure(body))
    )
    refusal = _replica_failure(failed)
    assert refusal["reason"] == "FailedCreate"
    assert 'pods "web-' in refusal["message"]
    assert " is forbidden: " in refusal["message"]
    events = f"/api/v1{namespace}/events"
    told = await api.until(events, lambda body: body["involvedObject"]["kind"] == "StatefulSet")
    assert (told["type"], told["reason"]) == ("Warning", "FailedCreate")
    assert 'pods "db-0" is forbidden: ' in told["message"]
    uid = told["involvedObject"]["uid"]
    selected = await api.get(events, fieldSelector=f"involvedObject.uid={uid},type=Warning")
    assert {each["involvedObject"]["uid"] for each in selected.body["items"]} == {uid}


def _replica_failure(body: Body) -> Body:
    conditions = (body.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == "ReplicaFailure"), {})


async def test_a_pod_that_was_refused_is_made_once_the_quota_is_gone(
    api: Client, namespace: str, with_controllers: None
) -> None:
    quotas = f"/api/v1{namespace}/resourcequotas"
    await api.post(quotas, {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}})
    await api.post(_apps(namespace, "statefulsets"), stateful_set("db"))
    await api.until(f"/api/v1{namespace}/events", lambda body: body["reason"] == "FailedCreate")
    await api.delete(f"{quotas}/none")
    await api.until(f"/api/v1{namespace}/pods", lambda body: body["metadata"]["name"] == "db-0")
