"""Server-side apply: who owns which field, on the fake and on a real server."""

from tests.fixtures.kubernetes.client import Answer, Client
from tests.fixtures.kubernetes.objects import config_map, deployment, widget


def _deployments(namespace: str) -> str:
    return f"/apis/apps/v1{namespace}/deployments"


def _conflicts(answer: Answer) -> list[str]:
    return [cause["field"] for cause in answer.body["details"]["causes"]]


async def test_applying_again_changes_nothing(api: Client, widgets: str) -> None:
    created = await api.apply(f"{widgets}/a", widget("a"), "one")
    again = await api.apply(f"{widgets}/a", widget("a"), "one")
    assert again.code == 200
    assert again.version == created.version


async def test_applying_another_value_conflicts_with_its_owner(api: Client, widgets: str) -> None:
    await api.apply(f"{widgets}/a", widget("a", workers=2), "one")
    refused = await api.apply(f"{widgets}/a", widget("a", workers=3), "two")
    assert (refused.code, refused.body["reason"]) == (409, "Conflict")
    assert _conflicts(refused) == [".spec.workers"]


async def test_a_field_no_longer_applied_is_removed(api: Client, namespace: str) -> None:
    path = f"/api/v1{namespace}/configmaps/c"
    await api.apply(path, config_map("c", a="1", b="2"), "one")
    applied = await api.apply(path, config_map("c", a="1"), "one")
    assert applied.body["data"] == {"a": "1"}


async def test_a_field_of_two_owners_stays_when_one_lets_go(api: Client, namespace: str) -> None:
    path = f"/api/v1{namespace}/configmaps/c"
    await api.apply(path, config_map("c", a="1", b="2"), "one")
    await api.apply(path, config_map("c", b="2"), "two")
    applied = await api.apply(path, config_map("c", a="1"), "one")
    assert applied.body["data"] == {"a": "1", "b": "2"}


async def test_containers_of_two_managers_live_side_by_side(api: Client, namespace: str) -> None:
    path = f"{_deployments(namespace)}/web"
    await api.apply(path, deployment("web", images={"main": "app:1"}), "one")
    await api.apply(path, deployment("web", images={"sidecar": "proxy:1"}), "two")
    applied = await api.apply(path, deployment("web", images={"main": "app:2"}), "one")
    containers = applied.body["spec"]["template"]["spec"]["containers"]
    assert [(c["name"], c["image"]) for c in containers] == [
        ("main", "app:2"),
        ("sidecar", "proxy:1"),
    ]
