"""Built-in kinds: defaults, refusals and controllers, on the fake and on a real server."""

from typing import Any

import pytest

from tests.fixtures.kubernetes.client import Client
from tests.fixtures.kubernetes.objects import deployment, stateful_set

Body = dict[str, Any]


def _apps(namespace: str, plural: str) -> str:
    return f"/apis/apps/v1{namespace}/{plural}"


@pytest.mark.parametrize(
    "spec", [{"serviceName": "other"}, {"podManagementPolicy": "Parallel"}], ids=str
)
async def test_most_of_a_stateful_set_cannot_change(
    api: Client, namespace: str, spec: Body
) -> None:
    path = _apps(namespace, "statefulsets")
    await api.post(path, stateful_set("db"))
    assert (await api.patch(f"{path}/db", {"spec": spec})).code == 422


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
