"""Which server the learner sends a worker to, over real calls."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

import pytest

from tests.fixtures.rollout.policy_versions import payload_of
from tests.fixtures.rollout.worker import quick_retries
from vcpo.metrics import RolloutMetrics
from vcpo.metrics.label_values import WeightForm
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import policy_pb2_grpc
from vcpo_learner.ledger.worker_registry import WorkerRegistry
from vcpo_learner.services.policy import PolicyService
from vcpo_learner.shared_file import SharedFile
from vcpo_learner.weight_server import process as process_module
from vcpo_learner.weight_server.process import WeightServer
from vcpo_learner.weights.peer_assignment import PeerAssignment
from vcpo_learner.weights.store import PolicyStore
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.channels import LearnerServers
from vcpo_rollout.transport.learner_client import LearnerClient
from vcpo_rollout.weights.fetcher import WeightFetcher

DEADLINE_S = 60.0


class Learner:
    """A learner's store behind its own service and behind a server of weights."""

    def __init__(self):
        self.store = PolicyStore(incarnation="now", clock=time.monotonic)
        self.server = WeightServer("127.0.0.1:0")
        peers = PeerAssignment(WorkerRegistry(time.monotonic))
        self.service = PolicyService(self.store, peers, weight_server=self.server)

    def publish(self, version):
        file = SharedFile.of(payload_of(version))
        self.store.publish(self.store.prepare(version, file))
        self.server.tell(self.store.held_files())

    async def is_sent_elsewhere(self, version):
        async with asyncio.timeout(DEADLINE_S):
            while not self.server.address_of(version):
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def learner_and_worker():
    learner = Learner()
    wire = WireServer(keys=None)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(learner.service, wire.grpc_server)
    port = await wire.start("127.0.0.1:0", ())
    servers = LearnerServers(f"127.0.0.1:{port}", key=None, identity=None, certificates=None)
    learner.server.start()
    try:
        async with servers.open() as channel:
            yield (
                learner,
                LearnerClient(
                    channel,
                    worker_id="w",
                    rollout_group="main",
                    servers=servers,
                    retries=quick_retries(),
                ),
            )
    finally:
        await learner.server.close(0.0)
        await wire.stop(0)


async def fetch(client):
    """Take in the newest version, as a worker does."""
    fetcher = WeightFetcher(client, RolloutGauges(RolloutMetrics(run="run", group="main")))
    return await fetcher.fetch(await client.newest_policy(None, wait_s=0))


async def test_a_worker_takes_versions_from_the_process_and_none_from_the_learner():
    async with learner_and_worker() as (learner, client):
        learner.publish(0)
        await learner.is_sent_elsewhere(0)
        weights = await fetch(client)
        assert weights.shards[0].payload == payload_of(0)
        assert not learner.service.served_bytes
    assert learner.server.sent_bytes == {WeightForm.FULL: len(payload_of(0))}


async def test_while_there_is_no_process_the_learner_sends_versions_itself(monkeypatch):
    monkeypatch.setattr(process_module, "_FIRST_PAUSE_S", DEADLINE_S)
    async with learner_and_worker() as (learner, client):
        learner.publish(0)
        await learner.is_sent_elsewhere(0)
        os.kill(learner.server.process_id, signal.SIGKILL)
        while learner.server.address_of(0):
            await asyncio.sleep(0.01)
        assert (await fetch(client)).shards[0].payload == payload_of(0)
        assert learner.service.served_bytes == {WeightForm.FULL: len(payload_of(0))}


async def test_a_worker_that_cannot_reach_the_process_gets_versions_from_the_learner_for_a_while():
    async with learner_and_worker() as (learner, client):
        learner.publish(0)
        await learner.is_sent_elsewhere(0)

        async def named():
            return (await client.newest_policy(None, wait_s=0)).address

        address = learner.server.address_of(0)
        assert await named() == address
        assert await named() == ""  # it asks again, as the address did not answer
        assert (await fetch(client)).shards[0].payload == payload_of(0)
        assert learner.service.served_bytes == {WeightForm.FULL: len(payload_of(0))}
        for version in (1, 15, 16):
            learner.publish(version)
            await learner.is_sent_elsewhere(version)
            assert await named() == ("" if version < 16 else address)


@pytest.mark.parametrize("held", [1, 2])
async def test_only_versions_that_the_process_has_are_fetched_there(held):
    async with learner_and_worker() as (learner, client):
        learner.publish(1)
        await learner.is_sent_elsewhere(1)
        learner.store.publish(learner.store.prepare(2, SharedFile.of(payload_of(2))))
        if held == 2:
            assert await learner.server.hold(learner.store.held_files())
        manifest = await client.newest_policy(None, wait_s=0)
        assert manifest.policy_version == 2
        assert bool(manifest.address) is (held == 2)
