"""A worker's channel follows the authority in its folder, without a restart."""

from __future__ import annotations

import asyncio
import contextlib

from tests.fixtures.certificates import write_certificates
from tests.unit.rollout.transport.failing_service import HELD, FailingLearner, learner_at
from vcpo.wire.access.tls import CertificateFolder
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import policy_pb2_grpc, work_pb2_grpc
from vcpo_rollout.transport.channels import LearnerChannel

NAME = "localhost"


@contextlib.asynccontextmanager
async def serve(learner, folder, port=0):
    server = WireServer(keys=None)
    work_pb2_grpc.add_WorkServiceServicer_to_server(learner, server.grpc_server)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(learner, server.grpc_server)
    port = await server.start(f"127.0.0.1:{port}", [], certificates=CertificateFolder(folder))
    try:
        yield port
    finally:
        await server.stop(0)


async def test_a_worker_follows_its_learner_to_another_authority(tmp_path):
    write_certificates(tmp_path, [NAME])
    folder, learner = CertificateFolder(tmp_path), FailingLearner()
    async with serve(learner, tmp_path) as port:
        channel = LearnerChannel(f"{NAME}:{port}", key=None, identity="own", certificates=folder)
        client = learner_at(channel)
        await client.lease(held=HELD, max_trajectories=1, wait_s=0)
    write_certificates(tmp_path, [NAME])
    async with serve(learner, tmp_path, port), asyncio.timeout(60.0):
        await client.lease(held=HELD, max_trajectories=1, wait_s=0)
        await client.newest_policy(None, wait_s=0)
    await channel.close()
    assert len(learner.requests) == 3
