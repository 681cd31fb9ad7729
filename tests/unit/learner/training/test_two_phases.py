"""Versions of two ranks, in real processes: announced once both can send their part, or never."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import safetensors.torch
import torch

from tests.fixtures.learner.dispatcher import make_run
from tests.fixtures.learner.models import llama
from tests.fixtures.learner.options import options
from tests.fixtures.learner.ranks import end_ranks, run_ranks
from tests.fixtures.learner.training import CountingUpdate, TrainingFixture
from vcpo.api.workloads import Precision
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo.wire.weights import verify
from vcpo_learner.follower import _follow
from vcpo_learner.model.published_state import own_rows
from vcpo_learner.ranks.commands import Commands
from vcpo_learner.ranks.environment import RankEnvironment
from vcpo_learner.ranks.ranks import LostRankError
from vcpo_learner.ranks.shard_reports import ShardReports
from vcpo_learner.ranks.sharding import place_model, whole
from vcpo_learner.services.policy import PolicyService
from vcpo_learner.training.mirrored_update import MirroredUpdate
from vcpo_learner.training.policy_on_ranks import PolicyOnRanks
from vcpo_learner.training.publication import Publication
from vcpo_learner.training.tensor_thread import TensorThread, TensorWork
from vcpo_learner.weights.peer_assignment import PeerAssignment
from vcpo_learner.weights.store import PolicyStore
from vcpo_rollout.transport.channels import server_address
from vcpo_rollout.weights.deltas import apply_deltas

PATIENCE_S = 20.0


class Rank:
    """The model of a rank, and the commands by which rank 0 changes it on all ranks."""

    def __init__(self, ranks):
        torch.manual_seed(0)
        self.model = llama()
        place_model(self.model, ranks, Precision.FLOAT32)
        self.commands = Commands(ranks)
        self.commands.on("change", lambda fields, _: self.change(fields["version"]))
        self.commands.on("gather", lambda *_: self.gather())

    @torch.no_grad()
    def change(self, version):
        """Change a twentieth of this rank's values."""
        for each in own_rows(self.model).values():
            each.view(-1)[version::20] += 1.0

    def gather(self):
        """All parameters, rounded, as rank 0 alone would publish them."""
        return {
            name: whole(each.detach()).bfloat16() for name, each in self.model.named_parameters()
        }


class Leader(Rank):
    """Rank 0: publishes versions and describes them to workers."""

    def __init__(self, ranks, run_dir):
        super().__init__(ranks)
        fixture = TrainingFixture(run_dir)
        self.dispatcher = fixture.dispatcher
        self.policies = PolicyStore(incarnation=ranks.incarnation, clock=time.monotonic)
        update = MirroredUpdate(CountingUpdate(self.model), self.commands, self.model)
        self.thread = TensorThread(make_run().spec, time.monotonic, pytest.fail)
        self.publication = Publication(
            Precision.BFLOAT16,
            update=update,
            tensor_thread=self.thread,
            dispatcher=self.dispatcher,
            ranks=ranks,
            policies=self.policies,
            weight_server=None,
            archive_writer=None,
            gauges=fixture.gauges,
            traces=fixture.traces,
            clock=time.monotonic,
            sleep=asyncio.sleep,
        )
        self.server = WireServer(keys=None)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(
            PolicyService(self.policies, PeerAssignment(fixture.registry)),
            self.server.grpc_server,
        )

    async def on_ranks(self, name, work, **fields):
        """Do something on all ranks, and return what it is on this one."""
        return await self.thread.run(
            TensorWork.STEP, lambda: self.commands.call(name, work, fields=fields)
        )

    async def begin_next(self):
        """Change the parameters and begin to publish them."""
        version = self.dispatcher.policy_version + 1
        await self.on_ranks("change", lambda: self.change(version), version=version)
        self.dispatcher.resume_at(version)
        await self.publication.begin()


class Worker:
    """Holds the shards of a version, and patches them with the deltas of the next."""

    def __init__(self, port):
        self._learner = f"127.0.0.1:{port}"
        self.manifest = None
        self.shards = []
        self.num_deltas = 0

    async def manifest_after(self, wait_s):
        """The newest manifest; one of a later version than the held one, if there is in time."""
        request = policy_pb2.GetManifestRequest(worker_id="w", wait_seconds=wait_s)
        if self.manifest is not None:
            request.held_policy_version = self.manifest.policy_version
            request.held_incarnation = self.manifest.incarnation
        async with grpc.aio.insecure_channel(self._learner) as channel:
            return await policy_pb2_grpc.PolicyServiceStub(channel).GetManifest(
                request, timeout=2 * PATIENCE_S
            )

    async def take(self):
        """Bring every shard to the next version, and verify it."""
        manifest = await self.manifest_after(PATIENCE_S)
        shards = []
        for number, shard in enumerate((manifest, *manifest.other_shards)):
            deltas = [await self._fetch(shard, each) for each in shard.deltas]
            self.num_deltas += len(deltas)
            payload = self.shards[number] if deltas else bytearray(await self._fetch(shard))
            apply_deltas(payload, deltas)
            verify(payload, shard)
            shards.append(payload)
        self.manifest, self.shards = manifest, shards

    async def _fetch(self, shard, delta=None):
        request = policy_pb2.FetchRequest(
            worker_id="w",
            incarnation=shard.incarnation,
            policy_version=shard.policy_version if delta is None else delta.policy_version,
            shard=shard.shard,
        )
        if delta is not None:
            request.base_policy_version = delta.base_policy_version
        address = server_address(shard.address, self._learner)
        async with grpc.aio.insecure_channel(address) as channel:
            fetching = policy_pb2_grpc.PolicyServiceStub(channel).Fetch(request, timeout=PATIENCE_S)
            return b"".join([chunk.data async for chunk in fetching])

    def tensors(self):
        """The whole tensors by name, of the rows of all shards."""
        parts = {}
        for shard, payload in zip(
            (self.manifest, *self.manifest.other_shards), self.shards, strict=True
        ):
            rows = safetensors.torch.load(bytes(payload))
            for entry in shard.tensors:
                parts.setdefault(entry.name, []).append((entry.first_row, rows[entry.name]))
        return {
            name: torch.cat([rows for _, rows in sorted(found, key=lambda part: part[0])])
            for name, found in parts.items()
        }


def follow(ranks):
    """A rank other than 0, as its process runs it."""
    rank = Rank(ranks)
    policy = PolicyOnRanks(
        ranks=ranks,
        model=rank.model,
        tokenizer=None,
        update=MirroredUpdate(CountingUpdate(rank.model), rank.commands, rank.model),
        commands=rank.commands,
    )
    given = options(Path("run"), plain_text=True)
    policy.update.close = lambda: None
    environment = RankEnvironment(rank=ranks.rank, size=ranks.size)
    asyncio.run(_follow(policy, given, environment, "run", given.listen))


@dataclass(frozen=True)
class Publishing:
    """What every rank does."""

    lead: Callable
    run_dir: Path
    break_rank_1: Callable = None

    def __call__(self, ranks):
        """What rank 0 found, and the incarnation; None on the other rank."""
        if ranks.is_leader:
            return asyncio.run(self._lead(ranks))
        if self.break_rank_1 is not None:
            self.break_rank_1()
        return follow(ranks)

    async def _lead(self, ranks):
        leader = Leader(ranks, self.run_dir)
        worker = Worker(await leader.server.start("127.0.0.1:0", ()))
        await leader.publication.begin()
        try:
            found = await self.lead(leader, worker)
        finally:
            await leader.server.stop(0.0)
        leader.publication.close()
        leader.commands.stop()
        return ranks.incarnation, found


async def publish_four(leader, worker):
    """Take four versions in, and compare each with what one rank would have published."""
    is_equal = []
    for version in range(4):
        if version:
            await leader.begin_next()
        await worker.take()
        await leader.publication.join()
        held, expected = worker.tensors(), await leader.on_ranks("gather", leader.gather)
        is_equal.append(
            held.keys() == expected.keys()
            and all(torch.equal(held[name], each) for name, each in expected.items())
        )
    return is_equal, worker.num_deltas, leader.policies.newest.full_set.file.size_bytes


def test_a_worker_that_fetches_from_two_ranks_has_every_version_bit_for_bit(tmp_path):
    work = Publishing(publish_four, tmp_path)
    (_, (is_equal, num_deltas, size_bytes)), none = run_ranks(2, work)
    assert is_equal == [True] * 4
    assert num_deltas == 2 * 3  # versions 1 to 3, of each shard
    assert none is None
    # Rank 0 holds its half, and no more.
    num_parameters = sum(each.numel() for each in llama().parameters())
    assert 2 * num_parameters // 2 <= size_bytes < 2 * num_parameters * 3 // 4


def rank_1_dies_before_it_reports_version_2():
    """It is killed when it has patched its set and workers can fetch it."""
    send = ShardReports.send

    def fatal(self, manifest):
        if manifest.policy_version == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, manifest)

    ShardReports.send = fatal


async def lose_version_2(leader, worker):
    """Publish versions until one is lost; what a worker has and hears then."""
    await worker.take()
    await leader.begin_next()
    await worker.take()
    await leader.begin_next()
    # As the training loop waits for a batch that only the next version would bring.
    with pytest.raises(LostRankError) as lost:
        await leader.publication.unless_it_fails(asyncio.sleep(PATIENCE_S))
    newest = await worker.manifest_after(0.0)
    return str(lost.value), newest.policy_version, leader.policies.newest.policy_version


def test_a_version_of_a_rank_that_dies_between_the_phases_is_never_announced(tmp_path):
    work = Publishing(lose_version_2, tmp_path / "1", rank_1_dies_before_it_reports_version_2)
    leader, lost = end_ranks(2, work, timeout_s=8)
    assert lost.status == -signal.SIGKILL
    assert leader.error == ""
    incarnation, (cause, told, held) = leader.result
    assert cause.startswith("version 2 is not announced")
    assert "rank 1 is gone or did not report within 8 s" in cause
    assert (told, held) == (1, 1)
    # The ranks start again, as what supervises them has them do, and publish as another learner.
    work = Publishing(publish_four, tmp_path / "2")
    (another, (is_equal, _, _)), _ = run_ranks(2, work)
    assert another != incarnation
    assert is_equal == [True] * 4


def rank_1_has_no_memory_for_version_1():
    prepare = PolicyStore.prepare

    def full(self, policy_version, weights):
        if policy_version == 1:
            raise MemoryError("no room for a delta")
        return prepare(self, policy_version, weights)

    PolicyStore.prepare = full


async def hear_why(leader, worker):
    await worker.take()
    await leader.begin_next()
    with pytest.raises(LostRankError) as failed:
        await leader.publication.join()
    return str(failed.value)


def test_a_rank_that_cannot_publish_says_why(tmp_path):
    work = Publishing(hear_why, tmp_path, rank_1_has_no_memory_for_version_1)
    leader, _ = end_ranks(2, work)
    _, cause = leader.result
    assert "rank 1: MemoryError: no room for a delta" in cause
