"""The client of the contract tests: plain HTTP, so that nothing hides what a server answers."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from tests.kube.errors import JsonObject
from tests.kube.real_api_server import Endpoint

APPLY = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
WAIT_LIMIT_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server said. body: the object, list or Status."""

    code: int
    body: JsonObject

    @property
    def metadata(self) -> JsonObject:
        """The metadata of the object."""
        metadata: JsonObject = self.body["metadata"]
        return metadata

    @property
    def version(self) -> str:
        """The resourceVersion of the object or list."""
        return str(self.metadata["resourceVersion"])

    @property
    def names(self) -> list[str]:
        """Names of the items of a list, in order."""
        return [item["metadata"]["name"] for item in self.body["items"]]


class Client:
    """Requests to one server. A context manager that closes its connections."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        certificate = self._endpoint.certificate
        tls = ssl.create_default_context(cafile=str(certificate)) if certificate else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls),
            headers={"Authorization": f"Bearer {self._endpoint.token}", "User-Agent": "contract/1"},
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

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Answer:
        """Any request."""
        async with self._opened().request(
            method,
            self._endpoint.url + path,
            data=None if body is None else json.dumps(body),
            params=query or {},
            headers={"Content-Type": content_type, "Accept": "application/json", **(headers or {})},
        ) as response:
            return Answer(code=response.status, body=_json(await response.text()))

    async def get(self, path: str, **query: str) -> Answer:
        """Read an object or a list."""
        return await self.send("GET", path, query=query)

    async def post(self, path: str, body: Any, **query: str) -> Answer:
        """Create an object."""
        return await self.send("POST", path, body, query=query)

    async def put(self, path: str, body: Any, **query: str) -> Answer:
        """Replace an object."""
        return await self.send("PUT", path, body, query=query)

    async def patch(self, path: str, patch: Any, content_type: str = MERGE, **query: str) -> Answer:
        """Change an object."""
        return await self.send("PATCH", path, patch, content_type=content_type, query=query)

    async def apply(self, path: str, config: Any, manager: str, **query: str) -> Answer:
        """Apply a configuration as manager."""
        return await self.patch(path, config, APPLY, fieldManager=manager, **query)

    async def delete(self, path: str, body: Any = None, **query: str) -> Answer:
        """Delete an object or a collection."""
        return await self.send("DELETE", path, body, query=query)

    async def watch(self, path: str, **query: str) -> AsyncIterator[tuple[str, JsonObject]]:
        """The events of a watch: kind and object. It ends when the server ends it."""
        async with self._opened().get(
            self._endpoint.url + path,
            params={"watch": "true", "timeoutSeconds": str(WAIT_LIMIT_S), **query},
        ) as response:
            async for line in response.content:
                event = json.loads(line)
                yield event["type"], event["object"]

    async def until(self, path: str, holds: Callable[[JsonObject], bool]) -> JsonObject:
        """Wait until some object of a collection satisfies holds; answers it.

        Raises:
            TimeoutError: when the watch ends without it.
        """
        async for kind, body in self.watch(path):
            if kind in ("ADDED", "MODIFIED") and holds(body):
                return body
        raise TimeoutError(f"nothing in {path} came to be as wanted in {WAIT_LIMIT_S} s")

    async def until_gone(self, collection: str, name: str) -> None:
        """Wait until an object is gone.

        Raises:
            TimeoutError: when the watch ends before that.
        """
        found = await self.get(collection)
        if name not in found.names:
            return
        async for kind, body in self.watch(collection, resourceVersion=found.version):
            if kind == "DELETED" and body["metadata"]["name"] == name:
                return
        raise TimeoutError(f"{collection}/{name} was not deleted in {WAIT_LIMIT_S} s")

    def _opened(self) -> aiohttp.ClientSession:
        assert self._session is not None, "enter the client before sending"
        return self._session


def _json(text: str) -> JsonObject:
    """A body; a path that no API serves is answered in plain words."""
    try:
        body: JsonObject = json.loads(text)
    except json.JSONDecodeError:
        return {"message": text}
    return body
