"""Limits on what a caller may take of a server: bytes, time, streams and connections."""

import asyncio
import contextlib
import resource
import struct

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.unit.wire.echo_service import KEY, KEYS, SERVICE, TIMEOUT_S, Echo, manifest
from vcpo.wire import guard as guard_module
from vcpo.wire import limits
from vcpo.wire.client import open_channel
from vcpo.wire.guard import Guard
from vcpo.wire.limits import server_options
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import control_pb2, control_pb2_grpc, policy_pb2, policy_pb2_grpc

GET_MANIFEST = f"/{SERVICE}/GetManifest"
CHECK = "/grpc.health.v1.Health/Check"


class Steered(control_pb2_grpc.ControlServiceServicer):
    """Has taken three steps."""

    async def GetSignals(self, request, context):  # noqa: N802 - named by the contract
        return control_pb2.Signals(policy_version=3)


@contextlib.asynccontextmanager
async def serve(servicer=None, *, keys=None, guard=None, **limits):
    """The address of a server with these limits."""
    server = WireServer(keys=keys, guard=guard or Guard(keys, **limits))
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(servicer or Echo(), server.grpc_server)
    control_pb2_grpc.add_ControlServiceServicer_to_server(Steered(), server.grpc_server)
    port = await server.start("127.0.0.1:0", [SERVICE])
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace_s=0)


def frame(kind, flags, stream, payload):
    """An HTTP/2 frame (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name, value):
    """A header as it is, without compression (RFC 7541, 6.2.2)."""
    return b"".join([b"\0", *(bytes([len(one)]) + one.encode() for one in (name, value))])


_DATA, _HEADERS, _SETTINGS, _WINDOW_UPDATE = 0, 1, 4, 8
_END_OF_STREAM, _END_OF_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(_SETTINGS, 0, 0, b"")


async def window_for(address, method, *headers):
    """Bytes that a server is ready to take in of a call's message of 30 MiB, before it refuses."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    always = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "server")]
    grpc_headers = [
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("grpc-timeout", "9S"),
    ]
    head = b"".join(header(*one) for one in (*always, *grpc_headers, *headers))
    start = struct.pack(">BI", 0, 30 << 20) + bytes(1000)
    writer.write(PREFACE + frame(_HEADERS, _END_OF_HEADERS, 1, head) + frame(_DATA, 0, 1, start))
    window, is_ended = 65_535, False
    with contextlib.suppress(TimeoutError):
        while not is_ended:
            async with asyncio.timeout(0.5):
                size, kind, flags, stream = struct.unpack(
                    ">IBBI", b"\0" + await reader.readexactly(9)
                )
                payload = await reader.readexactly(size)
            if kind == _SETTINGS and not flags:
                settings = dict(struct.iter_unpack(">HI", payload))
                window = settings.get(_INITIAL_WINDOW_SIZE, window)
            elif kind == _WINDOW_UPDATE and stream == 1:
                window += int.from_bytes(payload)
            is_ended = kind == _HEADERS and bool(flags & _END_OF_STREAM)
    writer.close()
    await writer.wait_closed()
    return window


@pytest.mark.parametrize("method", [GET_MANIFEST, CHECK])
async def test_of_what_a_stranger_sends_the_server_takes_in_next_to_nothing(method):
    async with serve(keys=KEYS) as address:
        assert await window_for(address, method) <= 1 << 17


async def test_what_a_friend_sends_it_asks_for_a_mebibyte_at_a_time():
    async with serve(keys=KEYS) as address:
        shown = [("authorization", f"Bearer {KEY}")]
        assert await window_for(address, GET_MANIFEST, *shown) >= 1 << 20


@pytest.mark.parametrize(
    ("timeout", "problem"),
    [
        (None, "deadline: every call must set a timeout"),
        (4000.0, "deadline: must be at most 3600 s away, not 40"),
    ],
)
async def test_a_call_says_when_it_ends(timeout, problem):
    async with serve() as address, open_channel(address, key=None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await manifest(channel, timeout=timeout)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(problem)


async def test_a_message_that_does_not_come_is_not_waited_for():
    async with serve(read_timeout_s=0.05) as address, grpc.aio.insecure_channel(address) as one:
        call = one.stream_unary(GET_MANIFEST)(timeout=TIMEOUT_S)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await call.details() == "message: it did not arrive within 0.05 s"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "message: one must be sent"),
        ([b"\xff"], "message: 1 bytes that are not a message of this method"),
    ],
    ids=["none", "not one"],
)
async def test_a_message_that_is_none_is_refused(messages, problem):
    async with serve() as address, grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_unary(GET_MANIFEST)(iter(messages), timeout=TIMEOUT_S)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == problem


async def test_only_so_many_messages_arrive_at_one_time(monkeypatch):
    monkeypatch.setattr(guard_module, "MAX_MESSAGES_READ", 1)
    guard, gate = Guard(None), asyncio.Event()
    async with serve(guard=guard) as address, grpc.aio.insecure_channel(address) as channel:

        async def late_message():
            await gate.wait()
            yield policy_pb2.GetManifestRequest(held_policy_version=1).SerializeToString()

        first = channel.stream_unary(GET_MANIFEST)(late_message(), timeout=TIMEOUT_S)
        async with asyncio.timeout(TIMEOUT_S):
            while not guard._reading.locked():
                await asyncio.sleep(0.001)
        second = asyncio.create_task(manifest(channel))
        _, waiting = await asyncio.wait({second}, timeout=0.1)
        assert waiting
        gate.set()
        assert policy_pb2.PolicyManifest.FromString(await first).policy_version == 1
        assert await second == 7


async def test_whoever_steers_a_run_waits_for_no_message_of_its_workers():
    guard = Guard(None)
    async with serve(guard=guard) as address, grpc.aio.insecure_channel(address) as channel:
        silent = [channel.stream_unary(GET_MANIFEST)(timeout=TIMEOUT_S) for _ in range(16)]
        async with asyncio.timeout(TIMEOUT_S):
            while not guard._reading.locked():
                await asyncio.sleep(0.001)
        control = control_pb2_grpc.ControlServiceStub(channel)
        signals = await control.GetSignals(control_pb2.GetSignalsRequest(), timeout=3.0)
        assert signals.policy_version == 3
        for one in silent:
            one.cancel()


async def test_connections_are_bounded_and_those_that_end_make_room(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))
    async with serve() as address:
        host, port = address.split(":")
        idle = [await asyncio.open_connection(host, port) for _ in range(3)]
        async with open_channel(address, key=None) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await manifest(channel, timeout=0.5)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            for _, writer in idle:
                writer.close()
            assert await manifest(channel, wait_for_ready=True) == 7


@pytest.mark.parametrize(
    ("bound", "said"),
    [("HANDSHAKE_S", b""), ("IDLE_CONNECTION_S", PREFACE)],
    ids=["says nothing", "makes no call"],
)
async def test_a_connection_without_calls_is_closed(monkeypatch, bound, said):
    monkeypatch.setattr(limits, bound, 0.2)
    async with serve() as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(said)
        async with asyncio.timeout(TIMEOUT_S):
            await reader.read()
        writer.close()
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def serve_probes():
    """The address of the port that answers health checks, and nothing else, in plain text."""
    server = WireServer(keys=KEYS)
    await server.start("127.0.0.1:0", [SERVICE], health_address="127.0.0.1:0")
    try:
        yield f"127.0.0.1:{server.health_port}"
    finally:
        await server.stop(grace_s=0)


@contextlib.asynccontextmanager
async def probes_without_window(address, num_calls, *headers):
    """Make health checks on a connection whose caller lets no byte of an answer pass."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    always = [(":method", "POST"), (":scheme", "http"), (":path", CHECK), (":authority", "server")]
    grpc_headers = [("te", "trailers"), ("content-type", "application/grpc")]
    head = b"".join(header(*one) for one in (*always, *grpc_headers, *headers))
    no_window = frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0))
    writer.write(PREFACE + no_window)
    for stream in range(1, 2 * num_calls, 2):
        writer.write(frame(_HEADERS, _END_OF_HEADERS, stream, head))
        writer.write(frame(_DATA, _END_OF_STREAM, stream, bytes(5)))
    yield reader
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize("headers", [[], [("grpc-timeout", "9S")]], ids=["no end", "an end"])
async def test_probes_are_answered_beside_callers_that_read_no_answer(headers):
    async with serve_probes() as address, contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            probes = probes_without_window(address, 20, *headers)
            reader = await stack.enter_async_context(probes)
            await reader.readexactly(9)
        async with open_channel(address, key=None) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for _ in range(20):
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_connection_of_probes_ends_with_the_answers_that_nobody_reads(monkeypatch):
    monkeypatch.setattr(limits, "PROBE_CONNECTION_S", 0.2)
    async with (
        serve_probes() as address,
        probes_without_window(address, 2, ("grpc-timeout", "9S")) as reader,
        asyncio.timeout(5.0),  # the calls themselves end later
    ):
        with contextlib.suppress(ConnectionError):
            await reader.read()


@pytest.mark.parametrize("timeout", [None, 90.0])
async def test_a_probe_says_when_it_ends(timeout):
    async with serve(guard=Guard(KEYS)) as address, open_channel(address, key=None) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith("deadline: ")


@pytest.mark.parametrize(
    ("max_open_files", "connections"), [(-1, 8192), (1024, 768), (65_536, 8192), (300, 150)]
)
def test_connections_leave_files_for_everything_else(max_open_files, connections):
    options = dict(server_options(max_open_files))
    assert options["grpc.max_allowed_incoming_connections"] == connections
