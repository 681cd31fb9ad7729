"""A Kubernetes API server for tests and laptops: HTTP on 127.0.0.1, everything in memory.

    async with FakeApiServer() as server:
        client.Configuration(host=server.url)

    python -m tests.fakes.kubernetes.api_server --port 8001
    kubectl --server http://127.0.0.1:8001 get namespaces

kmock listens, records requests and plays scripted answers (`server.kmock[...] << 503`); everything
else is answered here: objects, watches, server-side apply, custom resources with schemas and CEL,
and the controllers of Deployments, StatefulSets, owners and namespaces. It has no kubelet: pods
stay Pending until somebody reports for them. `tests/kube/contract` holds it to a real API server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from tests.fakes.kubernetes.access import ADMIN, User
from tests.fakes.kubernetes.api import Api
from tests.fakes.kubernetes.controllers.controllers import Controllers
from tests.fakes.kubernetes.emulator import Emulator, listener
from tests.fakes.kubernetes.faults import Faults
from tests.fakes.kubernetes.recorder import Recorder
from tests.fakes.kubernetes.requests.frontend import Frontend
from tests.fakes.kubernetes.requests.targets import WriteOptions, target_of
from tests.fakes.kubernetes.requests.watches import Watches

FIRST_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")


class FakeApiServer:
    """One server; an asynchronous context manager that listens while it is entered.

    port: 0 lets the system choose. tokens: holders of bearer tokens; requests without a token
    are the administrator's. clock: the present time with its zone, the system's when None.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        tokens: Mapping[str, User] | None = None,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self.tokens = dict(tokens or {})
        self.api = Api(clock=clock)
        self.recorder = Recorder()
        self.faults = Faults()
        self.watches = Watches(self.api)
        self.controllers = Controllers(self.api)
        frontend = Frontend(self.api, self.watches, self.recorder, self.faults, tokens=self.tokens)
        self.kmock = Emulator(frontend)
        self._server = listener(self.kmock, port=port)
        self._controlling: asyncio.Task[None] | None = None
        self._create_namespaces()

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self._server.port}"

    async def __aenter__(self) -> Self:
        await self.kmock.__aenter__()
        await self._server.__aenter__()
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
        await self._server.__aexit__(kind, error, trace)
        await self.kmock.__aexit__(kind, error, trace)

    async def wait_until_settled(self) -> None:
        """Wait until the controllers have dealt with every change."""
        await self.controllers.wait_until_settled()

    def compact(self) -> None:
        """Forget the history: a watch from an older version is answered with 410."""
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
            self.api.create(target, {"metadata": {"name": name}}, WriteOptions(manager="fake"))


@contextlib.contextmanager
def in_thread(**options: Any) -> Iterator[FakeApiServer]:
    """A server with its own event loop in its own thread, for tests that are not asynchronous.

    options: those of FakeApiServer. Its attributes belong to the other thread: read them, and
    add faults before the requests that they should hit.
    """
    started: threading.Event = threading.Event()
    loop = asyncio.new_event_loop()
    server: list[FakeApiServer] = []
    stop = asyncio.Event()

    async def serve() -> None:
        async with FakeApiServer(**options) as running:
            server.append(running)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    started.wait(timeout=10)
    try:
        yield server[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=10)
        loop.close()


async def serve_forever(port: int, tokens: Mapping[str, User]) -> None:
    """Listen until interrupted; the first line of output is a kubeconfig in JSON."""
    async with FakeApiServer(port=port, tokens=tokens) as server:
        sys.stdout.write(json.dumps(server.kubeconfig(next(iter(tokens), ""))) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def main() -> None:
    """Run the server from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.kubernetes.api_server")
    parser.add_argument("--port", type=int, default=8001, help="0 lets the system choose")
    parser.add_argument(
        "--token", action="append", default=[], help="a bearer token of the administrator"
    )
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve_forever(options.port, dict.fromkeys(options.token, ADMIN)))


if __name__ == "__main__":
    main()
