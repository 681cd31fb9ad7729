"""The node's own objects: the Node, its heartbeat, and the pods that are bound to it."""

import asyncio
from datetime import UTC, datetime

import aiohttp

from tests.fakes.kubelet.client import CONFLICT, ApiStatusError, KubeClient
from tests.fakes.kubelet.container import timestamp
from tests.fakes.kubelet.environment import JsonObject
from tests.fakes.kubelet.settings import KubeletSettings

_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_LEASE_S = 40


async def register(client: KubeClient, settings: KubeletSettings) -> None:
    """Make the Node, ready and empty."""
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "the fake kubelet is ready",
        "lastHeartbeatTime": timestamp(),
        "lastTransitionTime": timestamp(),
    }
    room = {"cpu": "64", "memory": "256Gi", "pods": "254"}
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": settings.node_name,
            "labels": {"kubernetes.io/hostname": settings.node_name},
        },
    }
    status = {"conditions": [ready], "capacity": room, "allocatable": room}
    path = f"/api/v1/nodes/{settings.node_name}"
    try:
        await client.create("/api/v1/nodes", node)
    except ApiStatusError as error:
        if error.code != CONFLICT:
            raise
    await client.merge_patch(f"{path}/status", {"status": status})
    # A real API server taints nodes that it has not heard of before.
    await client.merge_patch(path, {"spec": {"taints": None}})


async def bind(client: KubeClient, settings: KubeletSettings, pod: JsonObject) -> None:
    metadata = pod["metadata"]
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
        "target": {"apiVersion": "v1", "kind": "Node", "name": settings.node_name},
    }
    await client.create(f"{path}/binding", binding)


async def keep_alive(client: KubeClient, settings: KubeletSettings) -> None:
    """Renew the node's lease for ever; without it a real control plane evicts the pods."""
    name = settings.node_name
    while True:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": name, "leaseDurationSeconds": _LEASE_S, "renewTime": now}
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": "kube-node-lease"},
            "spec": spec,
        }
        try:
            await client.merge_patch(f"{_LEASES}/{name}", {"spec": spec})
        except ApiStatusError:
            await _make(client, lease)
        except aiohttp.ClientError:
            pass  # the next beat may get through
        await asyncio.sleep(settings.heartbeat_s)


async def _make(client: KubeClient, lease: JsonObject) -> None:
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": lease["metadata"]["namespace"]},
    }
    for path, body in (("/api/v1/namespaces", namespace), (_LEASES, lease)):
        try:
            await client.create(path, body)
        except (ApiStatusError, aiohttp.ClientError):
            continue  # it is there already, or the next beat makes it
