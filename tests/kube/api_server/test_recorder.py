from __future__ import annotations

from tests.fakes.kubernetes.api_server import FakeApiServer
from tests.fakes.kubernetes.recorder import Permission, granted_permissions, permissions
from tests.fixtures.kubernetes.client import Client
from tests.fixtures.kubernetes.objects import config_map, deployment

DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"


async def test_every_request_is_recorded_in_the_words_of_rbac(
    fake: FakeApiServer, client: Client
) -> None:
    await client.post(DEPLOYMENTS, deployment("web"))
    await client.patch(f"{DEPLOYMENTS}/web/scale", {"spec": {"replicas": 2}})
    await client.get(DEPLOYMENTS)
    await client.delete(f"{DEPLOYMENTS}/web")
    assert [str(request) for request in fake.recorder] == [
        "create deployments default",
        "patch deployments/scale default/web",
        "list deployments default",
        "delete deployments default/web",
    ]


async def test_a_record_keeps_what_was_sent(fake: FakeApiServer, client: Client) -> None:
    path = "/api/v1/namespaces/default/configmaps/a"
    await client.apply(path, config_map("a", k="v"), "operator")
    (request,) = fake.recorder
    assert request.body["data"] == {"k": "v"}
    assert request.query["fieldManager"] == "operator"
    assert request.content_type == "application/apply-patch+yaml"
    assert request.user_agent == "contract/1"


async def test_writes_leave_out_reading_and_dry_runs(fake: FakeApiServer, client: Client) -> None:
    await client.get(DEPLOYMENTS)
    await client.post(DEPLOYMENTS, deployment("web"), dryRun="All")
    assert fake.recorder.writes() == []


async def test_needed_permissions_compare_with_the_rules_of_a_role(
    fake: FakeApiServer, client: Client
) -> None:
    await client.get(DEPLOYMENTS)
    await client.patch(f"{DEPLOYMENTS}/web/scale", {})
    scale = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["patch"]}
    lists = {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["list", "watch"]}
    unused = granted_permissions([scale, lists]) - permissions(fake.recorder)
    assert unused == {Permission(group="apps", resource="deployments", verb="watch")}


async def test_the_controllers_own_writes_are_not_recorded(
    fake: FakeApiServer, client: Client
) -> None:
    await client.post(DEPLOYMENTS, deployment("web"))
    await fake.wait_until_settled()
    assert len(fake.recorder) == 1
