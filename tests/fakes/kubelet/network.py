"""The cluster's network on one machine: an address for every pod, and names of Services.

Every pod gets a loopback address of its own, so its ports are those of its spec and two pods may
listen on the same one. Linux answers on all of 127.0.0.0/8 without any set-up.

Names are resolved when a connection is made, by a proxy (HTTP CONNECT) that gRPC clients find in
`grpc_proxy`: neither the pods nor the operator know that they run outside a cluster.

    client -- CONNECT demo-learner.default.svc:7600 --> proxy -- Service, Pods --> 127.93.4.2:7600

Source: https://kubernetes.io/docs/concepts/services-networking/dns-pod-service/
"""

import asyncio
import base64
import contextlib
import ipaddress
import random
from collections import deque
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from tests.fakes.kubelet.client import ApiStatusError, KubeClient
from tests.fakes.kubelet.environment import JsonObject

_CHUNK_BYTES = 1 << 16
_HEAD_TIMEOUT_S = 10.0


class LoopbackAddresses:
    """Hands out addresses of 127.64.0.0/10; each fake kubelet keeps to a network of its own."""

    def __init__(self) -> None:
        draw = random.Random()
        network = f"127.{draw.randrange(64, 128)}.{draw.randrange(256)}"
        self._free = deque(f"{network}.{last}" for last in range(1, 255))

    def take(self) -> str:
        """An address that nobody has; the one that has been free for longest.

        Raises:
            IndexError: when all 254 are taken.
        """
        return self._free.popleft()

    def give_back(self, address: str) -> None:
        self._free.append(address)


class NameNotFoundError(LookupError):
    """No Service or pod of that name can be reached."""


def split_name(host: str, caller_namespace: str) -> tuple[str, str]:
    """Namespace and name of the Service that a name means, seen from a namespace.

    Raises:
        NameNotFoundError: when the name is none of a Service of a cluster.
    """
    name, _, rest = host.removesuffix(".cluster.local").partition(".")
    namespace, _, kind = rest.partition(".")
    if kind not in ("", "svc"):
        raise NameNotFoundError(f"{host} is no name of a Service")
    return namespace or caller_namespace, name


def endpoints(service: JsonObject, pods: Iterable[JsonObject]) -> list[JsonObject]:
    """Pods behind a Service that have an address; the operator's are headless, for unready too."""
    wanted: Mapping[str, str] = service["spec"].get("selector") or {}
    return [pod for pod in pods if _is_selected(pod, wanted)]


def _is_selected(pod: JsonObject, wanted: Mapping[str, str]) -> bool:
    labels = pod["metadata"].get("labels") or {}
    leaving = "deletionTimestamp" in pod["metadata"]
    has_address = bool((pod.get("status") or {}).get("podIP"))
    return bool(wanted) and wanted.items() <= labels.items() and has_address and not leaving


class ClusterNetwork:
    """The proxy through which pods and operator reach Services. A context manager."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def variables(self, namespace: str) -> dict[str, str]:
        """Environment with which a process of a namespace finds Services."""
        assert self._server is not None  # entered
        port = self._server.sockets[0].getsockname()[1]
        # The namespace travels as the user's name: short names are looked up in it.
        return {"grpc_proxy": f"http://{namespace}:@127.0.0.1:{port}", "no_grpc_proxy": ""}

    async def resolve(self, host: str, port: int, caller_namespace: str) -> tuple[str, int]:
        """Address and port that a name leads to now.

        Raises:
            NameNotFoundError: when it leads nowhere.
        """
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host)), port
        namespace, name = split_name(host, caller_namespace)
        base = f"/api/v1/namespaces/{namespace}"
        try:
            service = await self._client.get(f"{base}/services/{name}")
            pods = (await self._client.get(f"{base}/pods"))["items"]
        except ApiStatusError as error:
            raise NameNotFoundError(f"{host}: {error}") from error
        for pod in endpoints(service, pods):
            return pod["status"]["podIP"], port
        raise NameNotFoundError(f"no pod stands behind {host}")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._connect(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the other side went away, which is its right
        finally:
            self._connections.discard(task)
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        host, port, namespace = parse_connect(head)
        try:
            address = await self.resolve(host, port, namespace)
            far_reader, far_writer = await asyncio.open_connection(*address)
        except (NameNotFoundError, OSError) as error:
            writer.write(f"HTTP/1.1 502 {type(error).__name__}\r\n\r\n".encode())
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
        try:
            await _join((reader, writer), (far_reader, far_writer))
        finally:
            far_writer.close()


def parse_connect(head: str) -> tuple[str, int, str]:
    """Host, port and the caller's namespace from the head of a CONNECT request.

    Raises:
        OSError: when it is another request.
    """
    request, *lines = head.split("\r\n")
    method, _, rest = request.partition(" ")
    host, _, port = rest.partition(" ")[0].rpartition(":")
    if method != "CONNECT" or not port.isdecimal():
        raise OSError(f"not a CONNECT request: {request}")
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    scheme, _, credentials = headers.get("proxy-authorization", "").partition(" ")
    if scheme != "Basic":
        return host, int(port), "default"
    return host, int(port), base64.b64decode(credentials).decode().partition(":")[0]


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _join(near: _Stream, far: _Stream) -> None:
    """Carry bytes both ways until either side ends."""
    ways = [
        asyncio.create_task(_carry(near[0], far[1])),
        asyncio.create_task(_carry(far[0], near[1])),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
