"""Objects: creating, reading, changing and deleting them, on the fake and on a real server."""

from tests.fixtures.kubernetes.client import Client
from tests.fixtures.kubernetes.objects import config_map, owner_metadata, widget
from tests.fixtures.kubernetes.real_api_server import USER_NAME, USER_TOKEN

AS_USER = {"Authorization": f"Bearer {USER_TOKEN}"}


async def test_a_taken_name_is_refused(api: Client, widgets: str) -> None:
    await api.post(widgets, widget("a"))
    refused = await api.post(widgets, widget("a"))
    assert (refused.code, refused.body["reason"]) == (409, "AlreadyExists")


async def test_a_patch_that_changes_nothing_is_no_new_version(api: Client, widgets: str) -> None:
    created = await api.post(widgets, widget("a", workers=3))
    patched = await api.patch(f"{widgets}/a", {"spec": {"workers": 3}})
    assert patched.version == created.version


async def test_a_change_of_the_spec_raises_the_generation(api: Client, widgets: str) -> None:
    await api.post(widgets, widget("a"))
    patched = await api.patch(f"{widgets}/a", {"spec": {"workers": 3}})
    assert patched.metadata["generation"] == 2


async def test_the_status_endpoint_changes_the_status_only(api: Client, widgets: str) -> None:
    await api.post(widgets, widget("a"))
    patch = {"status": {"phase": "Done"}, "spec": {"workers": 7}}
    patched = await api.patch(f"{widgets}/a/status", patch)
    assert patched.body["status"] == {"phase": "Done"}
    assert patched.body["spec"]["workers"] == 1
    assert patched.metadata["generation"] == 1


async def test_replacing_an_old_version_conflicts(api: Client, widgets: str) -> None:
    read = (await api.post(widgets, widget("a"))).body
    read["spec"]["workers"] = 5
    assert (await api.put(f"{widgets}/a", read)).body["spec"]["workers"] == 5
    assert (await api.put(f"{widgets}/a", read)).code == 409


async def test_the_last_finalizer_takes_the_object_with_it(api: Client, widgets: str) -> None:
    await api.post(widgets, widget("a", metadata={"finalizers": ["contract.test/hold"]}))
    await api.delete(f"{widgets}/a")
    assert "deletionTimestamp" in (await api.get(f"{widgets}/a")).metadata
    assert (await api.patch(f"{widgets}/a", {"metadata": {"finalizers": None}})).code == 200
    assert (await api.get(f"{widgets}/a")).code == 404


async def test_dependents_go_with_their_last_owner(
    api: Client, namespace: str, widgets: str, with_controllers: None
) -> None:
    owner = (await api.post(widgets, widget("a"))).body
    path = f"/api/v1{namespace}/configmaps"
    await api.post(path, config_map("child", metadata=owner_metadata(owner)))
    await api.delete(f"{widgets}/a")
    await api.until_gone(path, "child")


async def test_a_role_grants_its_verbs_and_no_others(
    api: Client, namespace: str, widgets: str
) -> None:
    rbac = f"/apis/rbac.authorization.k8s.io/v1{namespace}"
    rule = {"apiGroups": ["contract.test"], "resources": ["widgets"], "verbs": ["list"]}
    await api.post(f"{rbac}/roles", {"metadata": {"name": "reader"}, "rules": [rule]})
    binding = {
        "metadata": {"name": "reader"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
        "subjects": [
            {"kind": "User", "name": USER_NAME, "apiGroup": "rbac.authorization.k8s.io"},
        ],
    }
    await api.post(f"{rbac}/rolebindings", binding)
    assert (await api.send("GET", widgets, headers=AS_USER)).code == 200
    assert (await api.send("DELETE", f"{widgets}/a", headers=AS_USER)).code == 403
