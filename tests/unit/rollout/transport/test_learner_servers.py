"""Weights come from the learner's server that the manifest names, under the worker's own keys."""

from __future__ import annotations

import contextlib

import pytest

from tests.fixtures.certificates import write_certificates
from tests.fixtures.rollout.policy_versions import FailingService, payload_of, store_of
from tests.fixtures.rollout.worker import quick_retries
from vcpo.wire.access.roles import CallerRole, new_key
from vcpo.wire.access.tls import CertificateFolder
from vcpo.wire.errors import UnavailableError
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import policy_pb2_grpc
from vcpo_rollout.transport.channels import LearnerServers, server_address
from vcpo_rollout.transport.learner_client import LearnerClient
from vcpo_rollout.transport.retries import UnreachableError
from vcpo_rollout.transport.transfer_buffer import Transfer, TransferKey

KEY = new_key()
NAME = "localhost"


@contextlib.asynccontextmanager
async def serve(service, folder):
    """Serve over TLS to workers that show the key; yields the port."""
    server = WireServer(keys={CallerRole.WORKER: KEY})
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(service, server.grpc_server)
    try:
        yield await server.start("127.0.0.1:0", [], certificates=CertificateFolder(folder))
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def client_of(folder, port):
    servers = LearnerServers(
        f"{NAME}:{port}", key=KEY, identity="own", certificates=CertificateFolder(folder)
    )
    async with servers.open() as channel:
        yield LearnerClient(
            channel, worker_id="w", rollout_group="main", servers=servers, retries=quick_retries()
        )


def transfer_of(version):
    manifest = store_of(version).get("now", version).manifest
    key = TransferKey(incarnation="now", policy_version=version, base_policy_version=None)
    return Transfer(key, manifest.total_bytes)


@pytest.mark.parametrize(
    ("address", "learner", "expected"),
    [
        ("", "learner:7600", "learner:7600"),
        (":7601", "learner:7600", "learner:7601"),
        (":7601", "[::1]:7600", "[::1]:7601"),
        ("rank-3:7601", "learner:7600", "rank-3:7601"),
    ],
)
def test_an_address_without_a_host_is_a_port_of_the_learner(address, learner, expected):
    assert server_address(address, learner) == expected


@pytest.mark.parametrize("host", ["", NAME])
async def test_weights_come_from_the_server_that_is_named_with_keys_and_over_tls(tmp_path, host):
    write_certificates(tmp_path, [NAME])
    learner, sender = FailingService(store_of(4)), FailingService(store_of(4))
    transfer = transfer_of(4)
    async with (
        serve(learner, tmp_path) as port,
        serve(sender, tmp_path) as sending_port,
        client_of(tmp_path, port) as client,
    ):
        assert await client.fetch(transfer, f"{host}:{sending_port}")
    assert transfer.buffer == payload_of(4)
    assert (len(learner.fetches), len(sender.fetches)) == (0, 1)


async def test_a_server_that_is_gone_is_given_up_and_the_learner_is_asked_again(tmp_path):
    write_certificates(tmp_path, [NAME])
    learner, sender = FailingService(store_of(4)), FailingService(store_of(4))
    transfer = transfer_of(4)
    async with serve(learner, tmp_path) as port, client_of(tmp_path, port) as client:
        async with serve(sender, tmp_path) as sending_port:
            pass
        with pytest.raises(UnreachableError, match="Fetch failed: UNAVAILABLE"):
            await client.fetch(transfer, f":{sending_port}")
        assert await client.fetch(transfer)
    assert transfer.buffer == payload_of(4)


async def test_a_server_that_breaks_off_goes_on_where_it_stopped_while_bytes_arrive(tmp_path):
    write_certificates(tmp_path, [NAME])
    sender, transfer = FailingService(store_of(4)), transfer_of(4)
    # Nine breaks: more failures than end a call, but never without a byte between them.
    sender.failures = [lambda data: data[: len(data) // 2]] * 9
    async with serve(sender, tmp_path) as port, client_of(tmp_path, port) as client:
        assert await client.fetch(transfer, f":{port}")
    assert (transfer.buffer, len(sender.fetches)) == (payload_of(4), 10)
    assert sender.num_bytes == len(payload_of(4))


async def test_a_server_that_stays_busy_is_given_up_with_the_bytes_that_it_sent(tmp_path):
    class Busy(FailingService):
        async def Fetch(self, request, context):  # noqa: N802 - named by the contract
            if self.fetches:
                raise UnavailableError("busy")
            async for chunk in super().Fetch(request, context):
                yield chunk

    write_certificates(tmp_path, [NAME])
    sender, transfer = Busy(store_of(4)), transfer_of(4)
    sender.failures = [lambda data: data[:1000]]
    async with serve(sender, tmp_path) as port, client_of(tmp_path, port) as client:
        with pytest.raises(UnreachableError, match="busy"):
            await client.fetch(transfer, f":{port}")
    assert transfer.num_arrived == 1000
