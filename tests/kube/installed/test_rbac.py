"""The chart's role is what the operator asks for: no call is refused, and no grant goes unused.

That none goes unused is read from the fake server's record; that none is refused, real one too.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys

import pytest

from tests.fakes.kubelet.client import ApiStatusError
from tests.fakes.kubernetes.access import service_account
from tests.fakes.kubernetes.recorder import Permission, granted_permissions, permissions
from tests.fixtures.chart.rendering import NAMESPACE, render
from tests.fixtures.kubernetes.waiting import until_stored
from tests.fixtures.operator.operator import (
    DEFINITIONS,
    DEPLOYMENT,
    KEY,
    PODS,
    RUN,
    OperatorFixture,
    connect,
    operator_fixture,
    signals,
    whole_operator,
)
from vcpo.control.signals import WorkerSignals
from vcpo.wire.phase import RunPhase
from vcpo_operator.cluster_api.client import needed_rights

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

CLAIM = "/api/v1/namespaces/default/persistentvolumeclaims/demo-learner"
CERTIFICATES = "/api/v1/namespaces/default/secrets/demo-tls"
GROUPS = [
    {"name": "main", "minReplicas": 1, "maxReplicas": 3},
    {"name": "more", "minReplicas": 1, "maxReplicas": 1},
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


async def install(operator, values):
    """Grant the operator's rights; their rules."""
    with contextlib.suppress(ApiStatusError):  # a real server may have it from another test
        await operator.client.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    for collection, body in rights(values):
        await operator.client.create(collection, body)
    return [rule for _, body in rights(values) for rule in body.get("rules") or ()]


async def uninstall(operator, values):
    """Take the rights back, so that no other test has them."""
    for collection, body in rights(values):
        await operator.client.delete(f"{collection}/{body['metadata']['name']}")


async def become(operator: OperatorFixture, values):
    """Make the operator's operator hold a token of the chart's service account."""
    (name,) = [b["metadata"]["name"] for _, b in rights(values) if b["kind"] == "ServiceAccount"]
    collection = COLLECTIONS["ServiceAccount"]
    issued = await operator.client.create(f"{collection}/{name}/token", {"spec": {}})
    token = issued["status"]["token"]
    operator.cluster = connect(operator.backend, token)
    operator.restart_operator()
    return token


async def live(operator):
    """A life in which the operator does everything that it ever does to objects."""
    every = {"podMonitor": True, "networkIsolation": "DenyAll"}
    none = {"podMonitor": False, "networkIsolation": "Disabled"}
    await operator.create(pods=every, rollouts=GROUPS, ttlSecondsAfterFinished=60)
    await operator.settle()
    await operator.schedule("demo-learner-0")
    await operator.reconcile()
    await operator.client.merge_patch(DEPLOYMENT, {"spec": {"replicas": 3}})
    operator.connections.signals = signals()
    await operator.settle()
    await operator.client.merge_patch(CERTIFICATES, {"data": {"learner.crt": None}})
    operator.now_s += 60.0  # it looks at the Secret again
    await operator.settle()
    pods = await operator.client.get("/api/v1/namespaces/default/pods")
    workers = [body["metadata"]["name"] for body in pods["items"]]
    busy = {name: WorkerSignals(in_flight=3, silent_s=0.0) for name in workers}
    operator.connections.signals = dataclasses.replace(signals(), workers=busy)
    smaller = [{**GROUPS[0], "maxReplicas": 1}]
    await operator.edit(pods=none, rollouts=smaller, learner={"image": "learner:2"})
    await operator.settle()
    # Its kubelet has ended the old pod.
    await operator.client.delete(f"{PODS}/demo-learner-0", {"gracePeriodSeconds": 0})
    operator.connections.signals = signals()
    await operator.settle()
    operator.connections.signals = signals(RunPhase.COMPLETE)
    await operator.settle()
    operator.now_s += 61.0
    await operator.reconcile()


async def watch(operator, namespaces):
    """The part of kopf: the operator runs until it has seen a run and spoken."""
    await operator.create()
    async with whole_operator(operator, token=TOKEN, namespaces=namespaces):
        await until_stored(operator.server, lambda: has_status(operator.server))


def has_status(server):
    body = server.api.store.get(("vcpo.dev", "vcporuns"), *KEY)
    return body is not None and body.get("status")


def needed_permissions(server, user):
    """Permissions that the operator's requests need; an apply that makes an object needs two."""
    requests = [each for each in server.recorder if each.user == user.name]
    applied = {
        (each.group, each.resource)
        for each in requests
        if each.content_type == "application/apply-patch+yaml" and not each.subresource
    }
    creates = {Permission(group=group, resource=name, verb="create") for group, name in applied}
    return permissions(requests) | creates


async def test_an_operator_without_some_rights_ends_at_once_and_names_them_all(tmp_path):
    user = account({})
    async with operator_fixture(tokens={TOKEN: user}, token=TOKEN) as operator:
        await install(operator, {})
        (role,) = [body for _, body in rights({}) if body["kind"] == "ClusterRole"]
        left = [each for each in role["rules"] if "networkpolicies" not in each["resources"]]
        left[0] = {**left[0], "verbs": ["list", "delete"]}
        path = f"{COLLECTIONS['ClusterRole']}/{role['metadata']['name']}"
        await operator.client.merge_patch(path, {"rules": left})
        access = json.dumps(operator.server.kubeconfig(TOKEN))
        (tmp_path / "kubeconfig").write_text(access)
        command = [sys.executable, "-m", "vcpo_operator", "--learner-image=l", "--rollout-image=r"]
        command += ["--metrics-listen=127.0.0.1:0", "--liveness-listen=127.0.0.1:0"]
        outside = {**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig")}
        limited = {"env": outside, "capture_output": True, "text": True, "timeout": PATIENT_S}
        ended = await asyncio.to_thread(subprocess.run, command, **limited)
    (line,) = ended.stderr.splitlines()
    assert line.endswith(
        "CRITICAL the operator's account may not watch vcporuns.vcpo.dev;"
        " get/list/watch/create/patch/delete networkpolicies.networking.k8s.io:"
        " grant it the roles of the chart (rbac.create)"
    )
    assert ended.returncode == 2


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
    async with operator_fixture(tokens={TOKEN: user}, token=TOKEN) as operator:
        rules = await install(operator, values)
        await operator.client.create(DEFINITIONS, POD_MONITORS)
        await live(operator)
        await watch(operator, namespaces)
        granted = granted_permissions(rules) - FOR_THE_OWNER_CHECK
        assert needed_permissions(operator.server, user) == granted
        asked = {
            Permission(group=group, resource=resource, verb=verb)
            for group, resource, verb in needed_rights(namespaced=bool(namespaces))
        }
        assert {each for each in granted if each.resource != "podmonitors"} == asked


@ROLES
async def test_a_real_server_refuses_the_charts_role_nothing(values, namespaces, real_endpoint):
    async with operator_fixture(real_endpoint) as operator:
        await install(operator, values)
        with contextlib.suppress(ApiStatusError):  # defined by the test before
            await operator.client.create(DEFINITIONS, POD_MONITORS)
        try:
            token = await become(operator, values)
            await until_granted(operator)
            await live(operator)
            await operator.create()
            async with whole_operator(operator, token=token, namespaces=namespaces):
                await until_status(operator)
        finally:
            await uninstall(operator, values)


async def until_granted(operator):
    """Wait until a look meets no refusal: a real server takes a moment to learn of roles."""
    await operator.create()
    async with asyncio.timeout(PATIENT_S):
        while (await operator.reconcile()).error:
            await asyncio.sleep(POLL_S)
    await operator.client.delete(RUN)
    await operator.client.delete(CLAIM)
    async with asyncio.timeout(PATIENT_S):
        while list(await operator.backend.objects()):
            await asyncio.sleep(POLL_S)


async def until_status(operator):
    """Wait until the operator has spoken of the run."""
    async with asyncio.timeout(PATIENT_S):
        while not (await operator.run()).get("status"):
            await asyncio.sleep(POLL_S)
