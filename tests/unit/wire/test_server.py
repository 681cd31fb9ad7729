"""The guard in front of every method, over a real server and real channels."""

from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.unit.wire.echo_service import KEY, KEYS, SERVICE, TIMEOUT_S, Echo, manifest
from vcpo.wire.access.roles import RoleKeys
from vcpo.wire.client import open_channel
from vcpo.wire.limits import MAX_MESSAGE_BYTES
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import policy_pb2_grpc


async def start_server(keys: RoleKeys | None) -> tuple[WireServer, str]:
    server = WireServer(keys=keys)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(Echo(), server.grpc_server)
    port = await server.start("127.0.0.1:0", [SERVICE])
    return server, f"127.0.0.1:{port}"


@pytest.fixture
async def server() -> AsyncIterator[WireServer]:
    running, running.address = await start_server(KEYS)  # type: ignore[attr-defined]
    yield running
    await running.stop(grace_s=0)


@pytest.fixture
def address(server) -> str:
    return server.address


@pytest.fixture
async def channel(address) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(address, key=KEY) as opened:
        yield opened


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_no_proxy_of_the_environment_stands_between(address, monkeypatch, name):
    for each in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    async with open_channel(address, key=KEY) as opened:
        assert await manifest(opened) == 7


class TestKey:
    async def test_the_right_key_is_let_in(self, channel):
        assert await manifest(channel) == 7

    @pytest.mark.parametrize("key", [None, "", "wrong-key", f"{KEY}x"])
    async def test_another_or_none_is_turned_away(self, address, key):
        async with open_channel(address, key=key) as stranger:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await manifest(stranger)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "set VCPO_WORKER_KEY" in refused.value.details()

    async def test_nobody_is_asked_where_none_is_configured(self):
        server, address = await start_server(None)
        async with open_channel(address, key=None) as anybody:
            assert await manifest(anybody) == 7
        await server.stop(grace_s=0)


class TestDeadline:
    async def test_a_call_without_one_is_refused(self, channel):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await manifest(channel, timeout=None)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == "deadline: every call must set a timeout"

    async def test_a_stranger_learns_nothing_but_that_he_is_one(self, address):
        async with open_channel(address, key="wrong") as stranger:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await manifest(stranger, timeout=None)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("error", "code", "details"),
    [
        (
            "malformed",
            grpc.StatusCode.INVALID_ARGUMENT,
            "worker_id: must be something else, got 'malformed'",
        ),
        ("gone", grpc.StatusCode.NOT_FOUND, "policy_version: 3 is retired"),
        ("busy", grpc.StatusCode.UNAVAILABLE, "the learner is starting"),
    ],
)
async def test_an_error_becomes_its_status_with_its_text(channel, error, code, details):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await manifest(channel, error)
    assert (refused.value.code(), refused.value.details()) == (code, details)


class TestProbes:
    """Health checks answer without a key, and nothing else does."""

    async def health(self, channel: grpc.aio.Channel, service: str) -> int:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        return (await stub.Check(request, timeout=TIMEOUT_S)).status

    @pytest.mark.parametrize("service", ["", SERVICE])
    async def test_a_server_is_serving_until_it_says_that_it_is_not(self, server, address, service):
        answer = health_pb2.HealthCheckResponse
        async with open_channel(address, key=None) as probe:
            assert await self.health(probe, service) == answer.SERVING
            await server.set_serving(serving=False)
            assert await self.health(probe, service) == answer.NOT_SERVING

    async def services(self, address: str, key: str) -> set[str]:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            metadata = [("authorization", f"Bearer {key}")]
            stream = stub.ServerReflectionInfo(
                iter([question]), timeout=TIMEOUT_S, metadata=metadata
            )
            answers = [answer async for answer in stream]
        return {each.name for each in answers[0].list_services_response.service}

    async def test_reflection_lists_the_services_to_who_has_a_key(self, address):
        assert {SERVICE, "grpc.health.v1.Health"} <= await self.services(address, KEY)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.services(address, "wrong")
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

    async def test_a_probe_that_watches_for_ever_needs_a_key(self, address):
        async with open_channel(address, key=None) as probe:
            watching = health_pb2_grpc.HealthStub(probe).Watch(health_pb2.HealthCheckRequest())
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await watching.read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

    async def test_an_unknown_method_is_unimplemented(self, address):
        async with open_channel(address, key=None) as probe:
            call = probe.unary_unary(f"/{SERVICE}/Nothing")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"", timeout=TIMEOUT_S)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


class TestSizes:
    async def test_a_message_beyond_the_limit_is_not_sent(self, channel):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await manifest(channel, "w" * MAX_MESSAGE_BYTES)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    async def test_a_message_beyond_the_limit_is_not_received(self, address):
        boundless = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(address, options=boundless) as careless:
            shown = [("authorization", f"Bearer {KEY}")]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await manifest(careless, "w" * MAX_MESSAGE_BYTES, metadata=shown)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_taken_port_is_an_error_of_the_system(address):
    with pytest.raises(OSError, match=f"cannot listen on {address}"):
        await WireServer(keys=None).start(address, [])
