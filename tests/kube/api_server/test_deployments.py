"""The fake's workload controllers; the test reports the pods' states as a kubelet would."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.kubernetes.api_server import FakeApiServer
from tests.fakes.kubernetes.controllers.deployments import Bounds, bounds_of
from tests.fixtures.kubernetes.client import Client
from tests.fixtures.kubernetes.objects import deployment, stateful_set

APPS = "/apis/apps/v1/namespaces/default"
PODS = "/api/v1/namespaces/default/pods"
READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


async def _make_ready(fake: FakeApiServer, client: Client) -> None:
    """Report every pod as ready, and let the controllers see it."""
    await fake.wait_until_settled()
    for name in (await client.get(PODS)).names:
        await client.patch(f"{PODS}/{name}/status", {"status": READY})
    await fake.wait_until_settled()


async def _images(client: Client) -> list[str]:
    pods = (await client.get(PODS)).body["items"]
    return sorted(pod["spec"]["containers"][0]["image"] for pod in pods)


def _image(image: str) -> dict[str, Any]:
    return {"spec": {"template": {"spec": {"containers": [{"name": "main", "image": image}]}}}}


@pytest.mark.parametrize(
    ("replicas", "rolling", "bounds"),
    [
        (4, {"maxSurge": "25%", "maxUnavailable": "25%"}, Bounds(surge=1, unavailable=1)),
        (3, {"maxSurge": "25%", "maxUnavailable": "25%"}, Bounds(surge=1, unavailable=0)),
        (10, {"maxSurge": "25%", "maxUnavailable": "25%"}, Bounds(surge=3, unavailable=2)),
        (5, {"maxSurge": 0, "maxUnavailable": 2}, Bounds(surge=0, unavailable=2)),
        (1, {"maxSurge": 0, "maxUnavailable": "25%"}, Bounds(surge=0, unavailable=1)),
    ],
)
def test_shares_round_up_above_and_down_below(
    replicas: int, rolling: dict[str, Any], bounds: Bounds
) -> None:
    strategy = {"type": "RollingUpdate", "rollingUpdate": rolling}
    assert bounds_of({"spec": {"replicas": replicas, "strategy": strategy}}) == bounds


async def test_a_roll_out_stops_at_its_bounds_until_pods_are_ready(
    fake: FakeApiServer, client: Client
) -> None:
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    await client.post(f"{APPS}/deployments", deployment("web", replicas=3, strategy=rolling))
    await _make_ready(fake, client)
    await client.patch(f"{APPS}/deployments/web", _image("app:2"))
    await fake.wait_until_settled()
    assert await _images(client) == ["app:1", "app:1", "app:2"]
    for _ in range(3):
        await _make_ready(fake, client)
    assert await _images(client) == ["app:2", "app:2", "app:2"]


async def test_recreate_waits_until_the_old_pods_are_gone(
    fake: FakeApiServer, client: Client
) -> None:
    await client.post(f"{APPS}/deployments", deployment("web", strategy={"type": "Recreate"}))
    await fake.wait_until_settled()
    (old,) = (await client.get(PODS)).names
    await client.post(f"{PODS}/{old}/binding", {"target": {"name": "node-0"}})
    await client.patch(f"{APPS}/deployments/web", _image("app:2"))
    await fake.wait_until_settled()
    assert (await client.get(PODS)).names == [old]
    await client.delete(f"{PODS}/{old}", gracePeriodSeconds="0")
    await fake.wait_until_settled()
    assert await _images(client) == ["app:2"]


async def test_the_cheapest_of_equal_pods_goes_first(fake: FakeApiServer, client: Client) -> None:
    await client.post(f"{APPS}/deployments", deployment("web", replicas=3))
    await _make_ready(fake, client)
    names = (await client.get(PODS)).names
    for name, cost in zip(names, ("5", "-3", "4"), strict=True):
        annotations = {"controller.kubernetes.io/pod-deletion-cost": cost}
        await client.patch(f"{PODS}/{name}", {"metadata": {"annotations": annotations}})
    await client.patch(f"{APPS}/deployments/web/scale", {"spec": {"replicas": 2}})
    await fake.wait_until_settled()
    assert (await client.get(PODS)).names == [names[0], names[2]]


async def test_the_status_counts_ready_pods(fake: FakeApiServer, client: Client) -> None:
    await client.post(f"{APPS}/deployments", deployment("web", replicas=2))
    await _make_ready(fake, client)
    status = (await client.get(f"{APPS}/deployments/web")).body["status"]
    conditions = {c["type"]: c["status"] for c in status["conditions"]}
    assert (status["readyReplicas"], status["observedGeneration"]) == (2, 1)
    assert conditions == {"Available": "True", "Progressing": "True"}


async def test_a_pod_deleted_by_hand_is_replaced(fake: FakeApiServer, client: Client) -> None:
    await client.post(f"{APPS}/deployments", deployment("web"))
    await fake.wait_until_settled()
    (old,) = (await client.get(PODS)).names
    await client.delete(f"{PODS}/{old}")
    await fake.wait_until_settled()
    (new,) = (await client.get(PODS)).names
    assert new != old


async def test_a_deleted_deployment_takes_sets_and_pods_along(
    fake: FakeApiServer, client: Client
) -> None:
    await client.post(f"{APPS}/deployments", deployment("web", replicas=2))
    await fake.wait_until_settled()
    await client.delete(f"{APPS}/deployments/web")
    await fake.wait_until_settled()
    assert (await client.get(PODS)).names == []
    assert (await client.get(f"{APPS}/replicasets")).names == []


async def test_a_failed_pod_of_a_stateful_set_is_recreated(
    fake: FakeApiServer, client: Client
) -> None:
    await client.post(f"{APPS}/statefulsets", stateful_set("db"))
    await _make_ready(fake, client)
    before = await client.get(f"{PODS}/db-0")
    await client.patch(f"{PODS}/db-0/status", {"status": {"phase": "Failed"}})
    await fake.wait_until_settled()
    after = await client.get(f"{PODS}/db-0")
    assert after.metadata["uid"] != before.metadata["uid"]


async def test_on_delete_keeps_old_pods_until_somebody_deletes_them(
    fake: FakeApiServer, client: Client
) -> None:
    await client.post(
        f"{APPS}/statefulsets", stateful_set("db", updateStrategy={"type": "OnDelete"})
    )
    await _make_ready(fake, client)
    await client.patch(f"{APPS}/statefulsets/db", _image("app:2"))
    await fake.wait_until_settled()
    assert await _images(client) == ["app:1"]
    await client.delete(f"{PODS}/db-0")
    await fake.wait_until_settled()
    assert await _images(client) == ["app:2"]


async def test_a_claim_outlives_its_pod(fake: FakeApiServer, client: Client) -> None:
    claim = {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    body = stateful_set("db", volumeClaimTemplates=[claim])
    await client.post(f"{APPS}/statefulsets", body)
    await fake.wait_until_settled()
    await client.delete(f"{APPS}/statefulsets/db")
    await fake.wait_until_settled()
    claims = await client.get("/api/v1/namespaces/default/persistentvolumeclaims")
    assert claims.names == ["data-db-0"]


async def test_paused_controllers_catch_up_when_resumed(
    fake: FakeApiServer, client: Client
) -> None:
    fake.controllers.pause()
    await client.post(f"{APPS}/deployments", deployment("web"))
    assert (await client.get(PODS)).names == []
    fake.controllers.resume()
    await fake.wait_until_settled()
    assert len((await client.get(PODS)).names) == 1
