"""A Kubernetes API server for tests: HTTP on 127.0.0.1, everything in memory.

    async with FakeApiServer() as server:
        client.Configuration(host=server.url)

It has objects, watches, server-side apply, custom resources with schemas and CEL, and the
controllers of Deployments, StatefulSets, owners and namespaces. It has no kubelet: pods stay
Pending until somebody reports for them. `tests/kube/contract` holds it to a real API server.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from aiohttp.test_utils import RawTestServer
from aiohttp.web_request import BaseRequest
from aiohttp.web_runner import ServerRunner

from tests.fakes.kubernetes.access import User
from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.controllers.controllers import Controllers
from tests.fakes.kubernetes.faults import Faults
from tests.fakes.kubernetes.recorder import Recorder
from tests.fakes.kubernetes.requests.frontend import Frontend
from tests.fakes.kubernetes.requests.targets import target_of
from tests.fakes.kubernetes.requests.watches import Watches

_MAX_BODY_BYTES = 3 * 1024 * 1024
"""As etcd takes them, with room for JSON around the text."""
FIRST_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")


class _Listener(RawTestServer):
    """aiohttp's bare server, with bodies as large as etcd takes and without a wait at its end."""

    async def _make_runner(self, debug: bool = False, **options: Any) -> ServerRunner:
        server = web.Server(self._handler, request_factory=self._request, **options)
        return ServerRunner(server, access_log=None, shutdown_timeout=0.1)

    def _request(self, *parts: Any) -> BaseRequest:
        return BaseRequest(*parts, self._loop, client_max_size=_MAX_BODY_BYTES)


class FakeApiServer:
    """One server; an asynchronous context manager that listens while it is entered.

    port: 0 lets the system choose. tokens: holders of bearer tokens; requests without a token
    are the administrator's. clock: the present time with its zone, the system's when None.
    api: what it holds at its start, and its clock; only the first namespaces when None.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        tokens: Mapping[str, User] | None = None,
        clock: Callable[[], datetime] | None = None,
        api: Api | None = None,
    ) -> None:
        self.tokens = dict(tokens or {})
        self.api = api or Api(clock=clock)
        self.recorder = Recorder()
        self.faults = Faults()
        self.watches = Watches(self.api)
        self.controllers = Controllers(self.api)
        frontend = Frontend(self.api, self.watches, self.recorder, self.faults, tokens=self.tokens)
        self._server = _Listener(frontend.handle, port=port)
        self._controlling: asyncio.Task[None] | None = None
        if api is None:
            self._create_namespaces()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    async def __aenter__(self) -> Self:
        await self._server.start_server()
        self._controlling = asyncio.create_task(self.controllers.run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.faults.clear()
        self.watches.close_all()
        if self._controlling is not None:
            self._controlling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._controlling
        await self._server.close()

    async def wait_until_settled(self) -> None:
        await self.controllers.wait_until_settled()

    def compact(self) -> None:
        self.api.store.compact()

    def kubeconfig(self, token: str = "") -> dict[str, Any]:
        """A kubeconfig for this server."""
        user = {"token": token} if token else {}
        context = {"cluster": "fake", "user": "fake", "namespace": "default"}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": user}],
            "contexts": [{"name": "fake", "context": context}],
            "current-context": "fake",
        }

    def _create_namespaces(self) -> None:
        target = target_of(self.api.catalogue, "/api/v1/namespaces")
        for name in FIRST_NAMESPACES:
            self.api.create(target, {"metadata": {"name": name}})
