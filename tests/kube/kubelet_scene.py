"""A fake API server with a kubelet stand-in, for tests that want to see pods run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kube.fake_api_server import FakeApiServer
from tests.kube.kubelet import Kubelet
from tests.kube.kubelet_client import KubeClient
from tests.kube.kubelet_environment import JsonObject
from tests.kube.kubelet_settings import ApiAccess, KubeletSettings
from tests.kube.store import ResourceKey

PODS: ResourceKey = ("", "pods")
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One server with one node."""

    server: FakeApiServer
    kubelet: Kubelet
    client: KubeClient
    root: Path

    async def pod(self, name: str, *command: str, **spec: Any) -> JsonObject:
        """Create a pod; see `pod_body`."""
        body = pod_body(name, *command, **spec)
        return await self.client.create("/api/v1/namespaces/default/pods", body)

    def status(self, name: str) -> JsonObject:
        """Status of a pod now; empty when there is no such pod."""
        body = self.server.api.store.get(PODS, "default", name)
        return (body or {}).get("status") or {}

    def container(self, name: str) -> JsonObject:
        """Status of a pod's container now, empty at first."""
        statuses = self.status(name).get("containerStatuses") or [{}]
        found: JsonObject = statuses[0]
        return found

    def log(self, name: str) -> str:
        """What the container's processes have said."""
        files = sorted((self.root / "logs" / f"default_{name}").glob("main.*.log"))
        return "".join(file.read_text() for file in files)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a change of the server's objects after which something holds."""
        await until_stored(self.server, condition)


def pod_body(name: str, *command: str, **spec: Any) -> JsonObject:
    """A pod of one container. spec: further fields of the container or the pod."""
    of_pod = {key: spec.pop(key) for key in list(spec) if key in _POD_FIELDS}
    container = {"name": "main", "image": "stand-in:1", "command": list(command), **spec}
    return {
        "metadata": {"name": name},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 20, **of_pod},
    }


_POD_FIELDS = ("volumes", "restartPolicy", "nodeSelector", "terminationGracePeriodSeconds")


async def until_stored(server: FakeApiServer, condition: Callable[[], object]) -> None:
    """Wait for a change of the server's objects after which the condition holds."""
    changed = asyncio.Event()
    unsubscribe = server.api.store.subscribe(lambda _: changed.set())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                changed.clear()
                await changed.wait()
    finally:
        unsubscribe()


@contextlib.asynccontextmanager
async def scene(root: Path) -> AsyncIterator[Scene]:
    """Start a server and a node whose patience is short."""
    async with FakeApiServer() as server:
        access = ApiAccess(url=server.url)
        settings = KubeletSettings(
            access=access,
            root=root,
            node_labels={"gpu": "none"},
            longest_probe_period_s=0.05,
            first_back_off_s=0.05,
        )
        async with Kubelet(settings) as kubelet, KubeClient(access) as client:
            yield Scene(server=server, kubelet=kubelet, client=client, root=root)
