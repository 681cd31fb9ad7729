"""A fake kubelet: runs the pods of an API server as processes of this machine.

It schedules pods onto one node, runs their containers from their real specs, probes and restarts
them, reports their status, and ends them as a kubelet does. No container runtime, no root, no
network set-up: see `environment` for what is substituted in a pod's spec, and
`network` for how pods find each other.

Departures from a kubelet: images and node selectors are not looked at, all processes share this
machine's files and user, resources and security contexts are ignored, a SIGKILL from outside is
taken for lack of memory, init containers, `envFrom`, life-cycle hooks and rarer volumes are refused
with `CreateContainerConfigError`. Linux only.
"""

import asyncio
import contextlib
from types import TracebackType
from typing import Self

import aiohttp

from tests.fakes.kubelet.client import ApiStatusError, KubeClient
from tests.fakes.kubelet.environment import JsonObject
from tests.fakes.kubelet.network import ClusterNetwork, LoopbackAddresses
from tests.fakes.kubelet.node import bind, keep_alive, register
from tests.fakes.kubelet.pod import Node, PodRun
from tests.fakes.kubelet.settings import KubeletSettings

_PODS = "/api/v1/pods"
_OVER = ("Succeeded", "Failed")


class Kubelet:
    """One node. A context manager: when it is left, none of its processes runs any more."""

    def __init__(self, settings: KubeletSettings) -> None:
        self._settings = settings
        self._client = KubeClient(settings.access)
        self.network = ClusterNetwork(self._client)
        self._addresses = LoopbackAddresses()
        self._pods: dict[str, PodRun] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._resources = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._resources.enter_async_context(self._client)
        await self._resources.enter_async_context(self.network)
        await register(self._client, self._settings)
        self._tasks = [
            asyncio.create_task(self._follow_pods()),
            asyncio.create_task(keep_alive(self._client, self._settings)),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(run.close() for run in self._pods.values()))
        await self._resources.aclose()

    async def _follow_pods(self) -> None:
        async with contextlib.aclosing(self._client.follow(_PODS)) as events:
            async for event in events:
                if event["type"] == "SYNC":
                    await self._observe_all(event["items"])
                elif event["type"] == "DELETED":
                    await self._forget(event["object"]["metadata"]["uid"])
                else:
                    await self._observe(event["object"])

    async def _observe_all(self, pods: list[JsonObject]) -> None:
        for gone in self._pods.keys() - {pod["metadata"]["uid"] for pod in pods}:
            await self._forget(gone)
        for pod in pods:
            await self._observe(pod)

    async def _observe(self, pod: JsonObject) -> None:
        uid = pod["metadata"]["uid"]
        if uid in self._pods:
            self._pods[uid].observe(pod)
        elif not pod["spec"].get("nodeName"):
            await self._schedule(pod)
        elif pod["spec"]["nodeName"] == self._settings.node_name and not _is_over(pod):
            self._start(pod)

    async def _schedule(self, pod: JsonObject) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            return
        # A pod that is gone, or that another scheduler was quicker with, is no concern any more.
        with contextlib.suppress(ApiStatusError, aiohttp.ClientError):
            await bind(self._client, self._settings, pod)

    def _start(self, pod: JsonObject) -> None:
        node = Node(client=self._client, network=self.network, settings=self._settings)
        run = PodRun(pod, self._addresses.take(), node)
        self._pods[pod["metadata"]["uid"]] = run
        run.observe(pod)

    async def _forget(self, uid: str) -> None:
        run = self._pods.pop(uid, None)
        if run is not None:
            await run.close()
            self._addresses.give_back(run.address)


def _is_over(pod: JsonObject) -> bool:
    return (pod.get("status") or {}).get("phase") in _OVER
