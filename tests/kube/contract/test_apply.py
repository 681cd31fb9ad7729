"""Server-side apply: who owns which field, on the fake and on a real server."""

from __future__ import annotations

from tests.fakes.kubernetes.patching.ownership import owners
from tests.fixtures.kubernetes.client import Answer, Client
from tests.fixtures.kubernetes.objects import config_map, deployment, widget


def _deployments(namespace: str) -> str:
    return f"/apis/apps/v1{namespace}/deployments"


def _conflicts(answer: Answer) -> list[str]:
    return [cause["field"] for cause in answer.body["details"]["causes"]]


async def test_applying_creates_what_is_absent(api: Client, widgets: str) -> None:
    created = await api.apply(f"{widgets}/a", widget("a"), "one")
    assert created.code == 201
    assert owners(created.body, ".spec.model") == {"one"}


async def test_applying_again_changes_nothing(api: Client, widgets: str) -> None:
    created = await api.apply(f"{widgets}/a", widget("a"), "one")
    again = await api.apply(f"{widgets}/a", widget("a"), "one")
    assert again.code == 200
    assert again.version == created.version


async def test_applying_needs_a_manager(api: Client, widgets: str) -> None:
    assert (await api.apply(f"{widgets}/a", widget("a"), "")).code in (400, 422)


async def test_applying_another_value_conflicts_with_its_owner(api: Client, widgets: str) -> None:
    await api.apply(f"{widgets}/a", widget("a", workers=2), "one")
    refused = await api.apply(f"{widgets}/a", widget("a", workers=3), "two")
    assert (refused.code, refused.body["reason"]) == (409, "Conflict")
    assert _conflicts(refused) == [".spec.workers"]


async def test_applying_the_same_value_shares_the_field(api: Client, widgets: str) -> None:
    await api.apply(f"{widgets}/a", widget("a", workers=2), "one")
    shared = await api.apply(f"{widgets}/a", widget("a", workers=2), "two")
    assert owners(shared.body, ".spec.workers") == {"one", "two"}


async def test_force_takes_the_field_away(api: Client, widgets: str) -> None:
    await api.apply(f"{widgets}/a", widget("a", workers=2), "one")
    taken = await api.apply(f"{widgets}/a", widget("a", workers=3), "two", force="true")
    assert taken.body["spec"]["workers"] == 3
    assert owners(taken.body, ".spec.workers") == {"two"}
    assert owners(taken.body, ".spec.model") == {"one", "two"}


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


async def test_a_field_of_others_is_left_alone(api: Client, namespace: str) -> None:
    path = f"/api/v1{namespace}/configmaps/c"
    await api.apply(path, config_map("c", a="1"), "one")
    await api.patch(path, {"data": {"b": "2"}}, fieldManager="two")
    applied = await api.apply(path, config_map("c", a="3"), "one")
    assert applied.body["data"] == {"a": "3", "b": "2"}


async def test_whoever_changes_a_field_owns_it(api: Client, namespace: str) -> None:
    path = f"/api/v1{namespace}/configmaps/c"
    await api.apply(path, config_map("c", a="1"), "one")
    patched = await api.patch(path, {"data": {"a": "2"}}, fieldManager="two")
    assert owners(patched.body, ".data.a") == {"two"}


async def test_replicas_that_nobody_owned_have_no_owner_after_scaling_either(
    api: Client, namespace: str
) -> None:
    path = f"{_deployments(namespace)}/web"
    await api.apply(path, deployment("web"), "operator")
    scaled = {"spec": {"replicas": 4}}
    await api.patch(f"{path}/scale", scaled, fieldManager="autoscaler")
    config = deployment("web", images={"main": "app:2"})
    applied = await api.apply(path, config, "operator", force="true")
    assert applied.body["spec"]["replicas"] == 4
    assert owners(applied.body, ".spec.replicas") == set()


async def test_scaling_takes_the_replicas_from_their_owner(api: Client, namespace: str) -> None:
    path = f"{_deployments(namespace)}/web"
    await api.apply(path, deployment("web", replicas=3), "operator")
    scaled = {"spec": {"replicas": 4}}
    await api.patch(f"{path}/scale", scaled, fieldManager="autoscaler")
    assert owners((await api.get(path)).body, ".spec.replicas") == {"autoscaler"}


async def test_replicas_that_their_only_owner_drops_fall_back_to_one(
    api: Client, namespace: str
) -> None:
    path = f"{_deployments(namespace)}/web"
    await api.apply(path, deployment("web", replicas=3), "operator")
    applied = await api.apply(path, deployment("web"), "operator")
    assert applied.body["spec"]["replicas"] == 1


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


async def test_applying_what_is_no_quantity_is_answered_as_a_fault_of_the_server(
    api: Client, namespace: str
) -> None:
    config = deployment("web")
    (container,) = config["spec"]["template"]["spec"]["containers"]
    container["resources"] = {"limits": {"memory": "16GB"}}
    refused = await api.apply(f"{_deployments(namespace)}/web", config, "one")
    assert refused.code == 500
    assert refused.body["message"].startswith(
        "failed to convert new object (/web; apps/v1, Kind=Deployment) to proper version"
    )
    assert "quantities must match the regular expression" in refused.body["message"]


async def test_applying_a_field_that_the_kind_does_not_have_is_answered_as_a_fault_of_the_server(
    api: Client, namespace: str
) -> None:
    config = deployment("web")
    config["spec"]["template"]["spec"]["nodeSelectr"] = {"pool": "gpus"}
    refused = await api.apply(f"{_deployments(namespace)}/web", config, "one")
    assert refused.code == 500
    assert refused.body["message"].endswith(
        ".spec.template.spec.nodeSelectr: field not declared in schema"
    )


async def test_applying_an_unknown_choice_is_invalid(api: Client, namespace: str) -> None:
    config = deployment("web")
    config["spec"]["template"]["spec"]["tolerations"] = [{"key": "a", "effect": "NoSchdule"}]
    refused = await api.apply(f"{_deployments(namespace)}/web", config, "one")
    assert refused.code == 422
    assert 'tolerations[0].effect: Unsupported value: "NoSchdule"' in refused.body["message"]


async def test_a_container_no_longer_applied_is_removed_whole(api: Client, namespace: str) -> None:
    path = f"{_deployments(namespace)}/web"
    await api.apply(path, deployment("web", images={"a": "i", "b": "i"}), "one")
    applied = await api.apply(path, deployment("web", images={"a": "i"}), "one")
    containers = applied.body["spec"]["template"]["spec"]["containers"]
    assert [c["name"] for c in containers] == ["a"]


async def test_keyed_items_of_a_custom_resource_merge(api: Client, widgets: str) -> None:
    await api.apply(f"{widgets}/a", widget("a", groups=[{"name": "x", "size": 1}]), "one")
    merged = await api.apply(f"{widgets}/a", widget("a", groups=[{"name": "y"}]), "two")
    assert [group["name"] for group in merged.body["spec"]["groups"]] == ["x", "y"]
    assert owners(merged.body, '.spec.groups[name="x"].size') == {"one"}


async def test_the_status_is_applied_under_its_own_entry(api: Client, widgets: str) -> None:
    await api.apply(f"{widgets}/a", widget("a"), "one")
    status = {key: widget("a")[key] for key in ("apiVersion", "kind", "metadata")}
    status["status"] = {"phase": "Done"}
    applied = await api.apply(f"{widgets}/a/status", status, "one")
    entries = applied.metadata["managedFields"]
    assert {entry.get("subresource", "") for entry in entries} == {"", "status"}
    assert applied.body["status"] == {"phase": "Done"}


async def test_applying_to_the_status_of_nothing_is_not_found(api: Client, widgets: str) -> None:
    body = widget("a") | {"status": {}}
    assert (await api.apply(f"{widgets}/a/status", body, "one")).code == 404


async def test_managed_fields_may_not_be_applied(api: Client, widgets: str) -> None:
    created = await api.apply(f"{widgets}/a", widget("a"), "one")
    created.body["metadata"].pop("resourceVersion")
    assert (await api.apply(f"{widgets}/a", created.body, "one")).code == 400
