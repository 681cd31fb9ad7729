"""Every call is counted by method and code, and timed, whatever becomes of it."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from tests.fixtures.rollout.worker import eventually
from tests.unit.wire.echo_service import IDENTITY, KEY, KEYS, SERVICE, Echo, manifest
from vcpo.wire.access.roles import CallerRole
from vcpo.wire.call_meter import METHODS, CallMeter
from vcpo.wire.client import open_channel
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import policy_pb2_grpc, work_pb2, work_pb2_grpc


class Broken(Echo):
    async def GetManifest(self, request, context):  # noqa: N802 - the name in the protocol
        raise RuntimeError("a bug")


class Slow(Echo):
    async def GetManifest(self, request, context):  # noqa: N802 - the name in the protocol
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def metered(servicer=None, *, keys=KEYS):
    """A channel to a server, and a function that waits for a number of calls and returns them.

    A caller may have its answer before the server has counted the call.
    """
    registry = CollectorRegistry()
    meter = CallMeter(
        Counter("calls", "Calls.", ("method", "code"), registry=registry),
        Histogram("calls_seconds", "Durations.", ("method",), registry=registry),
    )
    server = WireServer(keys=keys, meter=meter)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(servicer or Echo(), server.grpc_server)
    port = await server.start("127.0.0.1:0", [SERVICE])
    channel = open_channel(f"127.0.0.1:{port}", key=KEY, identity=IDENTITY)

    def read():
        samples = [each for family in registry.collect() for each in family.samples]
        calls = {
            (each.labels["method"], each.labels["code"]): each.value
            for each in samples
            if each.name == "calls_total"
        }
        timed = {
            each.labels["method"]: each.value
            for each in samples
            if each.name == "calls_seconds_count"
        }
        return calls, timed

    async def counted(number):
        await eventually(lambda: sum(read()[0].values()) >= number)
        return read()

    try:
        yield channel, counted
    finally:
        await channel.close()
        await server.stop(grace_s=0)


async def test_calls_are_counted_and_timed():
    async with metered() as (channel, counted):
        assert await manifest(channel) == 7
        assert await manifest(channel) == 7
        calls, timed = await counted(2)
    assert calls == {("GetManifest", "OK"): 2}
    assert timed == {"GetManifest": 2}


@pytest.mark.parametrize(
    ("worker_id", "code"),
    [("malformed", "INVALID_ARGUMENT"), ("gone", "NOT_FOUND"), ("busy", "UNAVAILABLE")],
)
async def test_an_error_is_counted_under_its_code(worker_id, code):
    async with metered() as (channel, counted):
        with pytest.raises(grpc.aio.AioRpcError):
            await manifest(channel, worker_id)
        calls, _ = await counted(1)
    assert calls == {("GetManifest", code): 1}


async def test_a_call_that_the_guard_refuses_is_counted():
    async with metered(keys={CallerRole.WORKER: "another"}) as (channel, counted):
        with pytest.raises(grpc.aio.AioRpcError):
            await manifest(channel)
        calls, _ = await counted(1)
    assert calls == {("GetManifest", "UNAUTHENTICATED"): 1}


async def test_a_bug_is_counted_as_unknown():
    async with metered(Broken()) as (channel, counted):
        with pytest.raises(grpc.aio.AioRpcError):
            await manifest(channel)
        calls, _ = await counted(1)
    assert calls == {("GetManifest", "UNKNOWN"): 1}


async def test_a_call_that_its_caller_gave_up_is_counted_as_cancelled():
    async with metered(Slow()) as (channel, counted):
        with pytest.raises(grpc.aio.AioRpcError):
            await manifest(channel, timeout=0.2)
        calls, _ = await counted(1)
    assert calls == {("GetManifest", "CANCELLED"): 1}


async def test_methods_that_nobody_serves_do_not_become_labels():
    async with metered() as (channel, counted):
        with pytest.raises(grpc.aio.AioRpcError):
            await work_pb2_grpc.WorkServiceStub(channel).Lease(work_pb2.LeaseRequest(), timeout=5)
        for number in range(3):
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(f"/made.up/Method{number}")(b"", timeout=5)
        calls, timed = await counted(4)
    assert calls == {("Lease", "UNIMPLEMENTED"): 1, ("other", "UNIMPLEMENTED"): 3}
    assert timed == {}


def test_the_methods_are_those_of_the_services_each_once():
    assert len(set(METHODS)) == len(METHODS)
    assert {"Lease", "Submit", "GetSignals", "Score", "other"} <= set(METHODS)
