"""The fake kubelet's client: JSON over HTTP, and a watch that reconnects.

Paths are those of the Kubernetes API, `/api/v1/namespaces/<ns>/pods/<name>/status`.
"""

import asyncio
import io
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from tests.fakes.kubelet.settings import ApiAccess

JsonObject = dict[str, Any]

USER_AGENT = "kubelet"
GONE = 410
NOT_FOUND = 404
CONFLICT = 409
_RECONNECT_S = 0.2
_WATCH_S = 240


class ApiStatusError(RuntimeError):
    """An answer other than success."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class KubeClient:
    """Requests to one API server. A context manager that closes its connections."""

    def __init__(self, access: ApiAccess) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = {"Accept": "application/json", "User-Agent": USER_AGENT}
        if self._access.token:
            headers["Authorization"] = f"Bearer {self._access.token}"
        connector = aiohttp.TCPConnector(ssl=self._access.tls or True, limit=0)
        self._session = aiohttp.ClientSession(
            self._access.url, headers=headers, connector=connector
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, **query: str) -> JsonObject:
        """Read an object or a list.

        Raises:
            ApiStatusError: when the answer is not success; so do all the others.
        """
        return await self._call("GET", path, query=query)

    async def create(self, path: str, body: Mapping[str, Any]) -> JsonObject:
        return await self._call("POST", path, body)

    async def merge_patch(self, path: str, body: Mapping[str, Any]) -> JsonObject:
        return await self._call("PATCH", path, body, content_type="application/merge-patch+json")

    async def delete(self, path: str, body: Mapping[str, Any] | None = None) -> JsonObject:
        return await self._call("DELETE", path, body or {})

    async def follow(self, path: str) -> AsyncGenerator[JsonObject, None]:
        """Every object of a collection, then every change, for ever.

        Yields watch events. A (re)started list gives `SYNC` with all objects of that moment in
        `items`; what is missing there has been deleted meanwhile.
        """
        while True:
            try:
                listed = await self.get(path)
                yield {"type": "SYNC", "items": listed.get("items") or []}
                version = listed["metadata"]["resourceVersion"]
                async for event in self._watch(path, version):
                    yield event
            except (aiohttp.ClientError, TimeoutError, ApiStatusError):
                await asyncio.sleep(_RECONNECT_S)

    async def _watch(self, path: str, version: str) -> AsyncIterator[JsonObject]:
        """Changes after a version, until the server has forgotten or is gone."""
        query = {"watch": "true", "timeoutSeconds": str(_WATCH_S), "allowWatchBookmarks": "true"}
        while True:
            timeout = aiohttp.ClientTimeout(total=None, sock_read=_WATCH_S + 30)
            parameters = {**query, "resourceVersion": version}
            async with self._open().get(path, params=parameters, timeout=timeout) as answer:
                if answer.status != 200:
                    raise ApiStatusError(answer.status, await answer.text())
                async for line in _lines(answer.content):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise ApiStatusError(status.get("code", GONE), status.get("message", ""))
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield event

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> JsonObject:
        data = None if body is None else io.BytesIO(json.dumps(body).encode())
        headers = {"Content-Type": content_type}
        request = self._open().request(method, path, params=query, data=data, headers=headers)
        async with request as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise ApiStatusError(answer.status, text)
            result: JsonObject = json.loads(text)
            return result

    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None  # entered
        return self._session


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; aiohttp's own iteration stops at 64 KiB."""
    rest = b""
    async for chunk in stream.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
