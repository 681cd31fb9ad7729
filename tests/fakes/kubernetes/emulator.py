"""The fake API server's side of kmock: its server, its record of requests, its scripted reactions.

    async with FakeApiServer() as server:
        server.kmock["get", "/api/v1/nodes"] << 503

What no script answers is answered by the API itself. kmock's own emulator of Kubernetes keeps bare
objects, so nothing of it but the way in is used; docs/design/010-reconcile.md says more.
Source: https://kmock.readthedocs.io
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import kmock
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from aiohttp.web_request import BaseRequest
from aiohttp.web_runner import ServerRunner

from tests.fakes.kubernetes.requests.frontend import Frontend

_MAX_BODY_BYTES = 3 * 1024 * 1024
"""As etcd takes them, with room for JSON around the text."""
_MOST_REMEMBERED = 1000
"""Requests that kmock's record keeps; a server under load would otherwise only grow."""


class Emulator(kmock.RawHandler):
    """Answers by kmock's scripts first, and by the API where none matches."""

    def __init__(self, frontend: Frontend) -> None:
        super().__init__()
        self._frontend = frontend
        self._requests: Any = deque(maxlen=_MOST_REMEMBERED)

    async def __call__(self, raw_request: web.BaseRequest) -> web.StreamResponse:
        # kmock 0.8 takes "/api/v1/namespaces" for the beginning of a longer path, and fails.
        if raw_request.path.rstrip("/").endswith("/namespaces"):
            return await self._frontend.handle(raw_request)
        return await super().__call__(raw_request)

    async def _handle(self, request: kmock.Request) -> web.StreamResponse:
        try:
            return await super()._handle(request)
        except NotImplementedError:  # kmock's word for "no script matches"
            assert request._raw_request is not None  # it is None in kmock's own tests only
            return await self._frontend.handle(request._raw_request)


class _Listener(RawTestServer):
    """aiohttp's bare server, with bodies as large as etcd takes and without a wait at its end."""

    async def _make_runner(self, debug: bool = False, **options: Any) -> ServerRunner:
        server = web.Server(self._handler, request_factory=self._request, **options)
        return ServerRunner(server, access_log=None, shutdown_timeout=0.1)

    def _request(self, *parts: Any) -> BaseRequest:
        return BaseRequest(*parts, self._loop, client_max_size=_MAX_BODY_BYTES)


listener = partial(kmock.Server, server_cls=_Listener)
"""A server of an emulator: an asynchronous context manager; its `port` is known once entered."""
