"""The chart's role is what the operator asks for: no call is refused, and no grant goes unused.

That none goes unused is read from the fake server's record; that none is refused, real one too.
"""

import asyncio
import contextlib
import dataclasses

import pytest

from tests.fakes.kubelet.client import ApiStatusError
from tests.fakes.kubernetes.access import service_account
from tests.fakes.kubernetes.recorder import Permission, granted, permissions
from tests.fixtures.chart.rendering import NAMESPACE, render
from tests.fixtures.kubernetes.kubelet import until_stored
from tests.fixtures.operator.server_scene import (
    DEFINITIONS,
    DEPLOYMENT,
    KEY,
    RUN,
    OperatorScene,
    connect,
    operator_scene,
    report,
    whole_operator,
)
from vcpo.wire.phase import RunPhase
from vcpo_operator.cluster_api.lease import LeaderLease
from vcpo_operator.decisions.stalled import PATIENCE_S
from vcpo_operator.observed.report import WorkerReport

TOKEN = "token-of-the-operator"
PATIENT_S = 30.0
POLL_S = 0.05
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
    {"name": "more", "minReplicas": 1, "maxReplicas": 1, "scaling": "External"},
]


def account(values):
    (found,) = [each for each in render(values) if each["kind"] == "ServiceAccount"]
    return service_account(NAMESPACE, found["metadata"]["name"])


def rights(values):
    """What `helm install` makes of the operator's rights: collections and objects."""
    return [
        (COLLECTIONS[body["kind"]].format(namespace=body["metadata"].get("namespace")), body)
        for body in render(values)
        if body["kind"] in COLLECTIONS and "aggregate-to" not in str(body["metadata"])
    ]


async def install(scene, values):
    """Grant the operator's rights; their rules."""
    with contextlib.suppress(ApiStatusError):  # a real server may have it from another test
        await scene.client.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    for collection, body in rights(values):
        await scene.client.create(collection, body)
    return [rule for _, body in rights(values) for rule in body.get("rules") or ()]


async def uninstall(scene, values):
    """Take the rights back, so that no other test has them."""
    for collection, body in rights(values):
        await scene.client.delete(f"{collection}/{body['metadata']['name']}")


async def become(scene: OperatorScene, values):
    """Make the scene's operator hold a token of the chart's service account."""
    (name,) = [b["metadata"]["name"] for _, b in rights(values) if b["kind"] == "ServiceAccount"]
    collection = COLLECTIONS["ServiceAccount"]
    issued = await scene.client.create(f"{collection}/{name}/token", {"spec": {}})
    token = issued["status"]["token"]
    scene.cluster = connect(scene.world, token)
    scene.restart_operator()
    return token


async def live(scene):
    """A life in which the operator does everything that it ever does to objects."""
    every = {"podMonitor": True, "disruptionBudgets": True, "networkIsolation": "DenyAll"}
    none = {"podMonitor": False, "disruptionBudgets": False, "networkIsolation": "Disabled"}
    await scene.create(pods=every, rollouts=GROUPS, ttlSecondsAfterFinished=60)
    await scene.settle()
    await scene.place("demo-learner-0")
    await scene.look()
    scene.now_s += PATIENCE_S  # its kubelet has not started it: the operator asks why
    await scene.look()
    await scene.client.merge_patch(f"{DEPLOYMENT}/scale", {"spec": {"replicas": 3}})
    scene.lines.says = report()
    await scene.settle()
    pods = await scene.client.get("/api/v1/namespaces/default/pods")
    workers = [body["metadata"]["name"] for body in pods["items"]]
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


ROLES = pytest.mark.parametrize(
    ("values", "namespaces"),
    [
        pytest.param({}, (), id="all namespaces"),
        pytest.param({"watchNamespaces": ["default"]}, ("default",), id="one namespace"),
    ],
)


@ROLES
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
        lease = LeaderLease(
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


@ROLES
async def test_a_real_server_refuses_the_charts_role_nothing(values, namespaces, real_endpoint):
    async with operator_scene(real_endpoint) as scene:
        await install(scene, values)
        with contextlib.suppress(ApiStatusError):  # defined by the test before
            await scene.client.create(DEFINITIONS, POD_MONITORS)
        try:
            token = await become(scene, values)
            await until_granted(scene)
            await live(scene)
            await scene.create()
            async with whole_operator(scene, token=token, namespaces=namespaces):
                await until_status(scene)
        finally:
            await uninstall(scene, values)


async def until_granted(scene):
    """Wait until a look meets no refusal: a real server takes a moment to learn of roles."""
    await scene.create()
    async with asyncio.timeout(PATIENT_S):
        while (await scene.look()).error:
            await asyncio.sleep(POLL_S)
    await scene.client.delete(RUN)
    await scene.world.cleared()


async def until_status(scene):
    """Wait until the operator has spoken of the run."""
    async with asyncio.timeout(PATIENT_S):
        while not (await scene.run()).get("status"):
            await asyncio.sleep(POLL_S)
