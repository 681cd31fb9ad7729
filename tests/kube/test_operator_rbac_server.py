"""The chart's role is what the operator asks for: no call is refused, and no grant goes unused."""

import dataclasses

import pytest

from tests.kube.access import service_account
from tests.kube.kubelet_scene import until_stored
from tests.kube.operator_scene import (
    DEFINITIONS,
    DEPLOYMENT,
    KEY,
    operator_scene,
    report,
    whole_operator,
)
from tests.kube.recorder import Permission, granted, permissions
from tests.unit.chart.rendering import NAMESPACE, render
from vcpo.wire.phase import RunPhase
from vcpo_operator.lease import Lease
from vcpo_operator.report import WorkerReport

TOKEN = "token-of-the-operator"
COLLECTIONS = {
    "ServiceAccount": f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings",
}
POD_MONITORS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "podmonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "scope": "Namespaced",
        "names": {"plural": "podmonitors", "kind": "PodMonitor", "listKind": "PodMonitorList"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}
FOR_THE_OWNER_CHECK = {Permission(group="vcpo.dev", resource="vcporuns/finalizers", verb="update")}
"""Only asked of the API server by itself, where it checks `blockOwnerDeletion`."""

GROUPS = [
    {"name": "main", "minReplicas": 1, "maxReplicas": 3},
    {"name": "more", "minReplicas": 1, "maxReplicas": 1},
]


def account(values):
    (found,) = [each for each in render(values) if each["kind"] == "ServiceAccount"]
    return service_account(NAMESPACE, found["metadata"]["name"])


async def install(scene, values):
    """What `helm install` makes of the operator's rights; its rules."""
    await scene.client.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    rules = []
    for body in render(values):
        if body["kind"] in COLLECTIONS and "aggregate-to" not in str(body["metadata"]):
            namespace = body["metadata"].get("namespace")
            path = COLLECTIONS[body["kind"]].format(namespace=namespace)
            await scene.client.create(path, body)
            rules += body.get("rules") or []
    return rules


async def live(scene):
    """A life in which the operator does everything that it ever does to objects."""
    every = {"podMonitor": True, "disruptionBudgets": True, "networkIsolation": "DenyAll"}
    none = {"podMonitor": False, "disruptionBudgets": False, "networkIsolation": "Disabled"}
    await scene.create(pods=every, rollouts=GROUPS, ttlSecondsAfterFinished=60)
    await scene.settle()
    await scene.client.merge_patch(f"{DEPLOYMENT}/scale", {"spec": {"replicas": 3}})
    scene.lines.says = report()
    await scene.settle()
    workers = [body["metadata"]["name"] for body in scene.server.api.store.objects(("", "pods"))]
    busy = {name: WorkerReport(in_flight=3, silent_s=0.0) for name in workers}
    scene.lines.says = dataclasses.replace(report(), workers=busy)
    own = {**none, "serviceAccountName": "theirs"}
    smaller = [{**GROUPS[0], "maxReplicas": 1}]
    await scene.edit(pods=own, rollouts=smaller, learner={"image": "learner:2"})
    await scene.settle()
    scene.lines.says = report(RunPhase.COMPLETE)
    await scene.settle()
    scene.now_s += 61.0
    await scene.look()


async def watch(scene, namespaces):
    """The part of kopf: the operator runs until it has seen a run and spoken."""
    await scene.create()
    async with whole_operator(scene, token=TOKEN, namespaces=namespaces):
        await until_stored(scene.server, lambda: has_status(scene.server))


def has_status(server):
    body = server.api.store.get(("vcpo.dev", "vcporuns"), *KEY)
    return body is not None and body.get("status")


def asked_for(server, user):
    """Permissions that the operator's requests need; an apply that makes an object needs two."""
    requests = [each for each in server.recorder if each.user == user.name]
    applied = {
        (each.group, each.resource)
        for each in requests
        if each.content_type == "application/apply-patch+yaml" and not each.subresource
    }
    creates = {Permission(group=group, resource=name, verb="create") for group, name in applied}
    return permissions(requests) | creates


@pytest.mark.parametrize(
    ("values", "namespaces"),
    [
        pytest.param({}, (), id="all namespaces"),
        pytest.param({"watchNamespaces": ["default"]}, ("default",), id="one namespace"),
    ],
)
async def test_the_charts_role_grants_what_the_operator_asks_for_and_nothing_else(
    values, namespaces
):
    user = account(values)
    async with operator_scene(tokens={TOKEN: user}, token=TOKEN) as scene:
        rules = await install(scene, values)
        await scene.client.create(DEFINITIONS, POD_MONITORS)
        await live(scene)
        await watch(scene, namespaces)
        assert asked_for(scene.server, user) == granted(rules) - FOR_THE_OWNER_CHECK


async def test_the_charts_lease_role_grants_what_a_lease_takes():
    values = {"leaderElection": {"enabled": True}}
    user = account(values)
    async with operator_scene(tokens={TOKEN: user}, token=TOKEN) as scene:
        rules = await install(scene, values)
        lease = Lease(
            cluster=scene.cluster,
            namespace=NAMESPACE,
            name="vcpo-operator",
            identity="one",
            clock=lambda: 0.0,
        )
        await lease.take()
        await lease.take()
        leases = {each for each in granted(rules) if each.resource == "leases"}
        assert asked_for(scene.server, user) == leases
