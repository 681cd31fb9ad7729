"""One pod on this node: volumes, containers, status, and its end."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from tests.fakes.kubelet.client import CONFLICT, NOT_FOUND, ApiStatusError, KubeClient
from tests.fakes.kubelet.container import Container, Launch, timestamp
from tests.fakes.kubelet.environment import (
    JsonObject,
    MissingReferenceError,
    Relocation,
    UnsupportedPodError,
    command_line,
    environment,
)
from tests.fakes.kubelet.network import ClusterNetwork
from tests.fakes.kubelet.settings import KubeletSettings
from tests.fakes.kubelet.status import pod_status
from tests.fakes.kubelet.volumes import (
    PodPaths,
    claims,
    make_volumes,
    mount_points,
    object_files,
    volume_references,
)

_LOGGER = logging.getLogger(__name__)
_RETRY_S = 0.2
_DEFAULT_GRACE_S = 30

Objects = Mapping[tuple[str, str], JsonObject]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What all pods of the node share."""

    client: KubeClient
    network: ClusterNetwork
    settings: KubeletSettings


class PodRun:
    """Runs one pod, from its binding to its end. Owner of its processes and of its status."""

    def __init__(self, pod: JsonObject, address: str, node: Node) -> None:
        self.address = address
        self._pod = pod
        self._node = node
        metadata = pod["metadata"]
        self._paths = PodPaths(
            root=node.settings.root,
            namespace=metadata["namespace"],
            pod=metadata["name"],
            uid=metadata["uid"],
        )
        self._url = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        self._changed = asyncio.Event()
        self._containers = [
            Container(spec, node.settings, self._changed.set) for spec in pod["spec"]["containers"]
        ]
        self._status: JsonObject = pod.get("status") or {}
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(self._mourn)
        self._reporting = asyncio.create_task(self._report())
        self._ending: asyncio.Task[None] | None = None

    def observe(self, pod: JsonObject) -> None:
        """Take in a newer state of the pod: only its deletion matters."""
        if "deletionTimestamp" in pod["metadata"] and self._ending is None:
            grace_s = pod["metadata"].get("deletionGracePeriodSeconds", self._grace_s)
            self._ending = asyncio.create_task(self._end(grace_s))

    async def close(self) -> None:
        """Kill everything at once, and say nothing: the pod, or the node, is gone."""
        tasks = [self._running, self._reporting, *([self._ending] if self._ending else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._paths.forget()

    @property
    def _grace_s(self) -> float:
        return float(self._pod["spec"].get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S))

    async def _run(self) -> None:
        self._changed.set()
        self._paths.directory.mkdir(parents=True, exist_ok=True)
        objects = await self._fetch_references()
        await self._bind_claims()
        launches = await self._launches(objects)
        async with asyncio.TaskGroup() as tasks:
            for container, launch in zip(self._containers, launches, strict=True):
                tasks.create_task(container.run(launch))

    def _mourn(self, ended: asyncio.Task[None]) -> None:
        if not ended.cancelled() and (failure := ended.exception()) is not None:
            _LOGGER.error("pod %s", self._url, exc_info=failure)
            self._wait_for("RunContainerError", repr(failure))

    async def _fetch_references(self) -> Objects:
        """ConfigMaps and Secrets of the pod; waits for those that are not there yet."""
        of_volumes, objects = volume_references(self._pod), {}
        for plural, name in [*of_volumes, *_variable_references(self._pod)]:
            is_reported = False
            while (body := await self._fetch(plural, name)) is None:
                missing = f'{plural.removesuffix("s")} "{name}" not found'
                if (plural, name) not in of_volumes:
                    self._wait_for("CreateContainerConfigError", missing)
                elif not is_reported:
                    await self._warn("FailedMount", f"MountVolume.SetUp failed: {missing}")
                is_reported = True
                await asyncio.sleep(_RETRY_S)
            objects[plural, name] = body
        return objects

    async def _fetch(self, plural: str, name: str) -> JsonObject | None:
        path = f"/api/v1/namespaces/{self._paths.namespace}/{plural}/{name}"
        try:
            return await self._node.client.get(path)
        except ApiStatusError as error:
            if error.code != NOT_FOUND:
                raise
            return None

    async def _warn(self, reason: str, message: str) -> None:
        """Post a Warning about the pod: what a kubelet says of volumes is in no status."""
        metadata = self._pod["metadata"]
        involved = {"apiVersion": "v1", "kind": "Pod"}
        involved |= {name: metadata[name] for name in ("name", "namespace", "uid")}
        event = {
            "metadata": {"generateName": f"{metadata['name']}."},
            "involvedObject": involved,
            "type": "Warning",
            "reason": reason,
            "message": message,
            "lastTimestamp": timestamp(),
            "source": {"component": "kubelet"},
        }
        await self._node.client.create(f"/api/v1/namespaces/{metadata['namespace']}/events", event)

    async def _bind_claims(self) -> None:
        """Say of the claims that they have their volume: the directory is one."""
        for name in claims(self._pod):
            path = f"/api/v1/namespaces/{self._paths.namespace}/persistentvolumeclaims/{name}"
            while True:
                try:
                    await self._node.client.merge_patch(
                        f"{path}/status", {"status": {"phase": "Bound"}}
                    )
                    break
                except ApiStatusError as error:
                    if error.code != NOT_FOUND:
                        raise
                    await asyncio.sleep(_RETRY_S)

    async def _launches(self, objects: Objects) -> list[Launch]:
        """How to start each container; a pod that cannot be started waits for ever."""
        try:
            return [self._launch(spec, objects) for spec in self._pod["spec"]["containers"]]
        except (UnsupportedPodError, MissingReferenceError) as error:
            self._wait_for("CreateContainerConfigError", str(error))
            await asyncio.Event().wait()
            raise

    def _launch(self, spec: JsonObject, objects: Objects) -> Launch:
        if self._pod["spec"].get("initContainers"):
            raise UnsupportedPodError("initContainers: not supported by the fake kubelet")
        relocate = Relocation(mount_points(self._pod, spec, self._paths), self.address)
        make_volumes(self._pod, self._paths, objects, relocate)

        def read_key(plural: str, name: str, key: str) -> str:
            files = object_files(plural, objects[plural, name])
            if key not in files:
                raise MissingReferenceError(f"couldn't find key {key} in {plural} {name}")
            return files[key].decode()

        pod = {**self._pod, "status": {"podIP": self.address, "hostIP": "127.0.0.1"}}
        own = environment(spec, pod, read_key)
        settings = self._node.settings
        command = [relocate(word) for word in command_line(spec, own)]
        image = settings.images.get(spec["image"].partition(":")[0])
        if image is not None:
            image.give(self._paths.directory)
            for name in claims(self._pod):
                image.give(settings.root / "claims" / self._paths.namespace / name)
            command = image.command(command, settings.root)
        return Launch(
            command=command,
            environment={
                **(settings.image_environment if image is None else image.environment),
                **self._node.network.variables(self._paths.namespace),
                **{name: relocate(value) for name, value in own.items()},
            },
            directory=self._paths.directory,
            logs=self._paths.logs,
            pod_ip=self.address,
            restart_policy=self._pod["spec"].get("restartPolicy", "Always"),
            grace_s=self._grace_s,
        )

    def _wait_for(self, reason: str, message: str) -> None:
        for container in self._containers:
            container.wait_for(reason, message)

    async def _end(self, grace_s: float) -> None:
        """SIGTERM, grace, SIGKILL; then let the API server forget the pod."""
        await asyncio.gather(*(each.stop(grace_s) for each in self._containers))
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self._paths.uid}}
        while True:
            try:
                await self._node.client.delete(self._url, options)
            except ApiStatusError as error:
                if error.code in (NOT_FOUND, CONFLICT):
                    return
            except aiohttp.ClientError:
                pass  # the API server is away; the pod must go all the same
            else:
                return
            await asyncio.sleep(_RETRY_S)

    async def _report(self) -> None:
        """Write the status whenever something has changed."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            states = [container.state for container in self._containers]
            status = pod_status(states, self._status, pod_ip=self.address, now=timestamp())
            if status == self._status:
                continue
            try:
                await self._node.client.merge_patch(f"{self._url}/status", {"status": status})
                self._status = status
            except (ApiStatusError, aiohttp.ClientError) as error:
                if isinstance(error, ApiStatusError) and error.code == NOT_FOUND:
                    return
                await asyncio.sleep(_RETRY_S)
                self._changed.set()


def _variable_references(pod: JsonObject) -> list[tuple[str, str]]:
    found = []
    for container in pod["spec"]["containers"]:
        for entry in container.get("env") or ():
            source = entry.get("valueFrom") or {}
            for key, plural in (("configMapKeyRef", "configmaps"), ("secretKeyRef", "secrets")):
                if key in source:
                    found.append((plural, str(source[key]["name"])))
    return found
