"""TLS over real servers and channels: who is trusted, and certificates that change in service."""

from __future__ import annotations

import contextlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fixtures.certificates import write_certificates
from tests.unit.wire.echo_service import SERVICE, TIMEOUT_S, Echo, manifest
from vcpo.wire.access.tls import NOBODY, CertificateFolder, checked_folder
from vcpo.wire.client import open_channel
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import policy_pb2_grpc

NAME = "demo-learner"


@contextlib.asynccontextmanager
async def serve(folder, **options):
    """A server with the certificate of a folder, and its port."""
    server = WireServer(keys=None)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(Echo(), server.grpc_server)
    port = await server.start(
        "127.0.0.1:0", [SERVICE], certificates=CertificateFolder(folder), **options
    )
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def trusting(folder, name=NAME):
    return CertificateFolder(folder).trust(name)


async def refusal(channel):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await manifest(channel, timeout=3.0)
    return refused.value.code()


async def test_a_client_that_trusts_the_authority_is_answered(tmp_path):
    write_certificates(tmp_path, [NAME])
    async with (
        serve(tmp_path) as (_, address),
        open_channel(address, key=None, trust=trusting(tmp_path)) as channel,
    ):
        assert await manifest(channel) == 7


@pytest.mark.parametrize("case", ["plain text", "another authority", "another name"])
async def test_no_call_passes_without_the_authority_and_the_name(tmp_path, case):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_certificates(ours, [NAME])
    write_certificates(theirs, [NAME])
    trust = {
        "plain text": None,
        "another authority": trusting(theirs),
        "another name": trusting(ours, "other-learner"),
    }[case]
    async with (
        serve(ours) as (_, address),
        open_channel(address, key=None, trust=trust) as channel,
    ):
        assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE


async def test_a_client_does_not_speak_to_a_server_in_plain_text(tmp_path):
    write_certificates(tmp_path, [NAME])
    server = WireServer(keys=None)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(Echo(), server.grpc_server)
    port = await server.start("127.0.0.1:0", [SERVICE])
    async with open_channel(f"127.0.0.1:{port}", key=None, trust=trusting(tmp_path)) as channel:
        assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


async def test_a_renewed_certificate_serves_new_connections_and_old_ones_go_on(tmp_path):
    served, renewed = tmp_path / "served", tmp_path / "renewed"
    write_certificates(served, [NAME])
    write_certificates(renewed, [NAME])
    before, after = trusting(served), trusting(renewed)
    async with (
        serve(served) as (_, address),
        open_channel(address, key=None, trust=before) as old,
    ):
        assert await manifest(old) == 7
        for name in ("tls.crt", "tls.key"):
            (served / name).write_bytes((renewed / name).read_bytes())
        async with open_channel(address, key=None, trust=after) as new:
            assert await manifest(new) == 7
        async with open_channel(address, key=None, trust=before) as late:
            assert await refusal(late) is grpc.StatusCode.UNAVAILABLE
        assert await manifest(old) == 7


async def test_a_certificate_that_is_gone_leaves_the_last_one_in_use(tmp_path):
    write_certificates(tmp_path, [NAME])
    trust = trusting(tmp_path)
    async with serve(tmp_path) as (_, address):
        (tmp_path / "tls.key").unlink()
        async with open_channel(address, key=None, trust=trust) as channel:
            assert await manifest(channel) == 7


async def test_probes_have_a_port_in_plain_text_that_answers_nothing_else(tmp_path):
    write_certificates(tmp_path, [NAME])
    async with serve(tmp_path, health_address="127.0.0.1:0") as (server, _):
        probed = f"127.0.0.1:{server.health_port}"
        async with open_channel(probed, key=None) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await manifest(channel)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            await server.set_serving(serving=False)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("address", ["0.0.0.0:7600", "10.1.2.3:7600", "learner:7600", "[::]:7600"])
def test_plain_text_beyond_this_machine_must_be_asked_for_by_name(address):
    with pytest.raises(ValueError, match="--plain-text") as refused:
        checked_folder({"--listen": address}, None, plain_text=False)
    assert str(refused.value).startswith(f"--listen={address}: others could read along")
    assert checked_folder({"--listen": address}, None, plain_text=True) is None


def test_a_learner_beyond_this_machine_is_not_called_in_plain_text_either():
    addresses = {"--listen": "127.0.0.1:0", "--learner": "learner:7600"}
    with pytest.raises(ValueError, match="--learner=learner:7600: others could read along"):
        checked_folder(addresses, None, plain_text=False)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:7600", "[::1]:7600", "127.8.0.1:1"])
def test_this_machine_needs_no_certificates(address):
    assert checked_folder({"--listen": address}, None, plain_text=False) is None


def test_files_that_do_not_fit_are_refused_by_name(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    write_certificates(one, [NAME])
    write_certificates(other, [NAME])
    assert checked_folder({"--listen": "0.0.0.0:1"}, one, plain_text=False) is not None
    with pytest.raises(ValueError, match="--plain-text: contradicts --tls"):
        checked_folder({"--listen": "0.0.0.0:1"}, one, plain_text=True)
    (one / "tls.key").write_bytes((other / "tls.key").read_bytes())
    with pytest.raises(ValueError, match=r"tls\.crt, tls\.key and ca\.crt must be"):
        checked_folder({"--listen": "0.0.0.0:1"}, one, plain_text=False)
    with pytest.raises(OSError, match="No such file"):
        checked_folder({"--listen": "0.0.0.0:1"}, tmp_path / "none", plain_text=False)


async def test_who_trusts_nobody_calls_nobody(tmp_path):
    write_certificates(tmp_path, [NAME])
    async with (
        serve(tmp_path) as (_, address),
        open_channel(address, key=None, trust=NOBODY) as channel,
    ):
        assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE
