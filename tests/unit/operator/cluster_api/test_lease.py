"""The lease: one operator acts, another takes over, by its own clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from kubernetes import client

from tests.fakes.kubernetes.api_server import FakeApiServer
from vcpo_operator.cluster_api.client import Cluster
from vcpo_operator.cluster_api.lease import DURATION_S, LeaderLease


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(name="server")
async def running_server() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer() as server:
        yield server


def lease(server: FakeApiServer, identity: str, clock: Clock) -> LeaderLease:
    cluster = Cluster(client.ApiClient(client.Configuration(host=server.url)))
    return LeaderLease(
        cluster=cluster, namespace="default", name="vcpo", identity=identity, clock=clock
    )


def holder(server: FakeApiServer) -> str:
    found = server.api.store.get(("coordination.k8s.io", "leases"), "default", "vcpo")
    assert found is not None
    return str(found["spec"]["holderIdentity"])


async def test_a_free_lease_is_taken(server: FakeApiServer):
    assert await lease(server, "a", Clock()).try_acquire()
    assert holder(server) == "a"


async def test_a_holder_renews(server: FakeApiServer):
    held = lease(server, "a", Clock())
    assert await held.try_acquire()
    assert await held.try_acquire()


async def test_a_held_lease_is_not_taken(server: FakeApiServer):
    await lease(server, "a", Clock()).try_acquire()
    assert not await lease(server, "b", Clock()).try_acquire()
    assert holder(server) == "a"


async def test_a_lease_that_stood_still_for_its_duration_is_taken(server: FakeApiServer):
    await lease(server, "a", Clock()).try_acquire()
    clock = Clock()
    other = lease(server, "b", clock)
    await other.try_acquire()
    clock.now_s += DURATION_S - 1
    assert not await other.try_acquire()
    clock.now_s += 1
    assert await other.try_acquire()
    assert holder(server) == "b"


async def test_a_lease_that_moves_is_never_taken(server: FakeApiServer):
    clock = Clock()
    held, other = lease(server, "a", clock), lease(server, "b", clock)
    for _ in range(4):
        assert await held.try_acquire()
        assert not await other.try_acquire()
        clock.now_s += DURATION_S - 1


async def test_a_holder_that_was_overtaken_knows_it(server: FakeApiServer):
    clock = Clock()
    held, other = lease(server, "a", clock), lease(server, "b", clock)
    await held.try_acquire()
    await other.try_acquire()
    clock.now_s += DURATION_S
    await other.try_acquire()
    assert not await held.try_acquire()


async def test_who_waits_for_a_lease_goes_on_when_the_api_server_does_not_answer():
    cluster = Cluster(client.ApiClient(client.Configuration(host="http://127.0.0.1:1")))
    waiting = LeaderLease(
        cluster=cluster, namespace="default", name="vcpo", identity="a", clock=Clock()
    ).acquire()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting, 0.2)
    cluster.close()


async def test_a_lease_that_is_given_back_is_taken_at_once(server: FakeApiServer):
    held, other = lease(server, "a", Clock()), lease(server, "b", Clock())
    await held.try_acquire()
    assert not await other.try_acquire()
    await other.release()
    assert holder(server) == "a"  # only its holder frees it
    await held.release()
    assert await other.try_acquire()
    assert holder(server) == "b"
