"""A kopf operator in this process against the fake server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import kopf

from tests.fakes.kubernetes.api_server import FakeApiServer
from tests.fixtures.kubernetes.client import Client
from tests.fixtures.kubernetes.objects import WIDGET_DEFINITION, widget
from tests.fixtures.kubernetes.real_api_server import ADMIN_TOKEN, Endpoint

WIDGETS = "/apis/contract.test/v1/namespaces/default/widgets"
WAIT_LIMIT_S = 20


def _registry(server: FakeApiServer) -> kopf.OperatorRegistry:
    """A registry that logs in to the fake; a fresh one has no login handler of its own."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**_: object) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=server.url, token=ADMIN_TOKEN)

    return registry


@contextlib.asynccontextmanager
async def _operator(registry: kopf.OperatorRegistry) -> AsyncIterator[None]:
    """A running operator. It must end in the task that began it: kopf cancels younger tasks."""
    stop, ready = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(
        kopf.operator(
            registry=registry,
            namespaces=["default"],
            standalone=True,
            stop_flag=stop,
            ready_flag=ready,
        )
    )
    try:
        async with asyncio.timeout(WAIT_LIMIT_S):
            await ready.wait()
            yield
    finally:
        stop.set()
        await running


@contextlib.asynccontextmanager
async def _client(server: FakeApiServer) -> AsyncIterator[Client]:
    async with Client(Endpoint(url=server.url, token=ADMIN_TOKEN)) as client:
        definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        await client.post(definitions, WIDGET_DEFINITION)
        yield client


async def test_each_change_is_handled_exactly_once(fake: FakeApiServer) -> None:
    registry, handled = _registry(fake), asyncio.Queue[str]()

    @kopf.on.create("widgets", registry=registry)
    @kopf.on.update("widgets", registry=registry)
    @kopf.on.delete("widgets", registry=registry)
    async def note(reason: str, **_: object) -> None:
        handled.put_nowait(reason)

    async with _client(fake) as api, _operator(registry):
        await api.post(WIDGETS, widget("a"))
        seen = [await handled.get()]
        await api.patch(f"{WIDGETS}/a", {"spec": {"workers": 2}})
        seen.append(await handled.get())
        await api.delete(f"{WIDGETS}/a")
        seen.append(await handled.get())
        await api.until_gone(WIDGETS, "a")
    assert seen == ["create", "update", "delete"]
    assert handled.empty()


async def test_a_watch_that_the_server_closes_is_taken_up_again(fake: FakeApiServer) -> None:
    registry, named = _registry(fake), asyncio.Queue[str]()

    @kopf.on.event("widgets", registry=registry)
    async def note(name: str, **_: object) -> None:
        named.put_nowait(name)

    async with _client(fake) as api, _operator(registry):
        await api.post(WIDGETS, widget("a"))
        assert await named.get() == "a"
        fake.watches.close_all()
        fake.compact()
        await api.post(WIDGETS, widget("b"))
        while await named.get() != "b":
            pass
