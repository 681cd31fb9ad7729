"""Calls to an API server that refuses, is busy, or does not respond."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from kubernetes import client

from tests.fakes.kubernetes.api_server import FakeApiServer
from tests.fakes.kubernetes.errors import ApiError as ServerError
from tests.fakes.kubernetes.faults import Effect, Fault
from vcpo_operator.cluster_api.client import ApiError, Cluster, Resource

SERVICE = Resource(api_version="v1", plural="services", namespace="default", name="s")
BODY = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "s", "namespace": "default"},
    "spec": {"ports": [{"port": 80}]},
}


@pytest.fixture(name="server")
async def running_server() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer() as server:
        yield server


@pytest.fixture(name="cluster")
def connected_cluster(server: FakeApiServer) -> Cluster:
    settings = client.Configuration(host=server.url)
    settings.retries = False
    return Cluster(client.ApiClient(settings), timeout_s=0.3)


@pytest.mark.parametrize(
    ("resource", "path"),
    [
        (SERVICE, "/api/v1/namespaces/default/services/s"),
        (
            Resource(
                api_version="apps/v1",
                plural="deployments",
                namespace="ml",
                name="d",
                subresource="scale",
            ),
            "/apis/apps/v1/namespaces/ml/deployments/d/scale",
        ),
        (
            Resource(api_version="v1", plural="events", namespace="ml"),
            "/api/v1/namespaces/ml/events",
        ),
    ],
)
def test_paths_are_those_of_the_api(resource: Resource, path: str):
    assert resource.path == path


async def test_what_is_not_there_is_none(cluster: Cluster):
    assert await cluster.get(SERVICE) is None


async def test_an_apply_makes_and_names_its_manager(cluster: Cluster):
    made = await cluster.apply(SERVICE, BODY, manager="me", force=False)
    assert made["metadata"]["managedFields"][0]["manager"] == "me"


async def test_a_field_of_another_manager_is_not_taken_without_force(cluster: Cluster):
    await cluster.apply(SERVICE, BODY, manager="first", force=False)
    other = {**BODY, "spec": {"ports": [{"port": 80, "targetPort": 81}], "type": "NodePort"}}
    await cluster.apply(SERVICE, other, manager="second", force=True)
    changed = {**BODY, "spec": {"ports": [{"port": 80}], "type": "ClusterIP"}}
    with pytest.raises(ApiError) as refused:
        await cluster.apply(SERVICE, changed, manager="first", force=False)
    assert refused.value.status == 409


async def test_deleting_what_is_gone_is_no_error(cluster: Cluster):
    await cluster.delete(SERVICE, uid="x")


async def test_an_object_with_another_uid_is_not_deleted(cluster: Cluster):
    await cluster.apply(SERVICE, BODY, manager="me", force=False)
    await cluster.delete(SERVICE, uid="somebody-else")
    assert await cluster.get(SERVICE) is not None


async def test_a_refusal_says_what_the_server_says(cluster: Cluster):
    broken = {**BODY, "metadata": {"name": "other", "namespace": "default"}}
    with pytest.raises(ApiError, match="name"):
        await cluster.apply(SERVICE, broken, manager="me", force=False)


@pytest.mark.parametrize("effect", [Effect.DROP, Effect.HANG])
async def test_no_answer_is_an_error_without_a_status(
    server: FakeApiServer, cluster: Cluster, effect: Effect
):
    server.faults.add(Fault(effect=effect, resource="services"))
    with pytest.raises(ApiError) as refused:
        await cluster.get(SERVICE)
    assert refused.value.status == 0


async def test_a_busy_servers_retry_after_is_passed_on(server: FakeApiServer, cluster: Cluster):
    busy = ServerError(429, "TooManyRequests", "later", retry_after_s=3)
    server.faults.add(Fault(error=busy, resource="services"))
    with pytest.raises(ApiError) as refused:
        await cluster.get(SERVICE)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 3.0)


async def test_every_answer_is_counted(server: FakeApiServer):
    seen: list[tuple[str, str, int]] = []
    settings = client.Configuration(host=server.url)
    cluster = Cluster(client.ApiClient(settings), on_answer=lambda *answer: seen.append(answer))
    await cluster.get(SERVICE)
    assert seen == [("GET", "services", 404)]


@pytest.mark.parametrize(
    ("status", "message", "is_invalid"),
    [
        (422, "anything", True),
        (500, "failed to create typed patch object (ml/a; v1, Kind=Pod): .x: not declared", True),
        (500, "failed to convert new object (ml/a; v1, Kind=Pod) to proper version: ...", True),
        (500, "failed to create manager for existing fields: failed to convert new object", False),
        (500, "etcdserver: request timed out", False),
        (409, "conflict", False),
    ],
)
def test_an_object_is_at_fault_where_the_same_again_would_be_refused_again(
    status: int, message: str, is_invalid: bool
):
    assert ApiError(status, message).is_invalid is is_invalid
