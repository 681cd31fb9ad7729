"""A standby operator responds to the liveness probe and leaves the address to kopf afterwards."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
from kubernetes import client

from tests.fakes.kubernetes.api_server import FakeApiServer
from tests.fixtures.operator.runs import DEFAULTS
from vcpo.metrics import OperatorMetrics
from vcpo_operator.app import Operator, Options
from vcpo_operator.cluster_api.client import Cluster
from vcpo_operator.cluster_api.lease import LeaderLease, serve_standby_probe


@pytest.fixture(name="address")
def free_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def status(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status


async def test_who_waits_is_alive(address: str):
    async with serve_standby_probe(f"{address}/healthz"):
        assert await status(f"{address}/healthz") == 200
        assert await status(f"{address}/elsewhere") == 404


async def test_the_address_is_free_for_who_comes_next(address: str):
    for _ in range(2):
        async with serve_standby_probe(f"{address}/healthz"):
            assert await status(f"{address}/healthz") == 200
    with pytest.raises(aiohttp.ClientConnectionError):
        await status(f"{address}/healthz")


async def test_without_an_endpoint_nothing_is_served():
    async with serve_standby_probe(None):
        pass


def lease(cluster: Cluster, identity: str) -> LeaderLease:
    return LeaderLease(
        cluster=cluster,
        namespace="default",
        name="vcpo",
        identity=identity,
        clock=lambda: 0.0,
    )


async def until_alive(url: str) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                assert await status(url) == 200
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.02)
            else:
                return


async def test_an_operator_that_waits_for_the_lease_is_alive_and_can_be_stopped(address: str):
    async with FakeApiServer() as server:
        cluster = Cluster(client.ApiClient(client.Configuration(host=server.url)))
        assert await lease(cluster, "other").try_acquire()
        endpoint = f"{address}/healthz"
        options = Options(defaults=DEFAULTS, liveness_endpoint=endpoint)
        metrics, stop = OperatorMetrics(), asyncio.Event()
        operator = Operator(options, cluster, metrics)
        running = asyncio.create_task(operator.run(stop, lease(cluster, "one")))
        await until_alive(endpoint)
        assert metrics.registry.get_sample_value("vcpo_operator_leader") == 0.0
        stop.set()
        await asyncio.wait_for(running, 20)
        cluster.close()
