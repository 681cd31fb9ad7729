"""Versions of two ranks, in real processes: announced once both can send their part, or never."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import pytest
import torch

from tests.fixtures.learner.dispatcher import make_run
from tests.fixtures.learner.models import llama
from tests.fixtures.learner.ranks import end_ranks, run_ranks
from tests.fixtures.learner.training import CountingUpdate, TrainingFixture, options
from tests.fixtures.rollout.policy_versions import ELSEWHERE
from vcpo.api.workloads import Precision
from vcpo.metrics import RolloutMetrics
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo_learner.event_loop import TensorThread
from vcpo_learner.follower import _follow
from vcpo_learner.model.published_state import PublishedState, own_rows
from vcpo_learner.ranks.commands import Commands
from vcpo_learner.ranks.ranks import LostRankError, RankEnvironment
from vcpo_learner.ranks.sharding import place_model, whole
from vcpo_learner.services.work import PolicyService
from vcpo_learner.training import publication as publication_module
from vcpo_learner.training.policy_on_ranks import PolicyOnRanks
from vcpo_learner.training.publication import Publication
from vcpo_learner.weights.store import PolicyStore, VersionFolder
from vcpo_rollout.engines.loading_weights import tensors_of
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.weight_files import WeightFiles
from vcpo_rollout.weights.receiver import WeightFetcher

PATIENCE_S = 20.0


def run_in(run_dir):
    """A run whose versions are in its directory."""
    return make_run(weights={"storeUrl": str(run_dir / "store")})


class Rank:
    """The model of a rank, and the commands by which rank 0 changes it on all ranks."""

    def __init__(self, ranks):
        torch.manual_seed(0)
        self.model = llama()
        place_model(self.model, ranks, Precision.FLOAT32)
        self.commands = Commands(ranks)
        self.commands.on("change", self.change)
        self.commands.on("gather", self.gather)

    @torch.no_grad()
    def change(self, version):
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
        folder = VersionFolder.open(
            run_in(run_dir).spec.weights, "run", run_dir, incarnation=ranks.incarnation, shard=0
        )
        self.policies = PolicyStore(folder, incarnation=ranks.incarnation, clock=time.monotonic)
        self.thread = TensorThread()
        self.publication = Publication(
            precision=Precision.BFLOAT16,
            commands=self.commands,
            published=PublishedState(self.model, self.policies.full_set_memory),
            tensor_thread=self.thread,
            dispatcher=self.dispatcher,
            ranks=ranks,
            policies=self.policies,
            weight_server=None,
            gauges=fixture.gauges,
        )
        self.server = WireServer(keys=None)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(
            PolicyService(self.policies, self.dispatcher), self.server.grpc_server
        )

    async def on_ranks(self, name, work, **fields):
        return await self.thread.run(lambda: self.commands.call(name, work, **fields))

    async def begin_next(self):
        """Change the parameters and begin to publish them."""
        version = self.dispatcher.policy_version + 1
        await self.on_ranks("change", lambda: self.change(version), version=version)
        self.dispatcher.policy_version = version
        await self.publication.begin()


class Worker:
    """Brings the shards of a version to the next."""

    def __init__(self, port):
        self._learner = f"127.0.0.1:{port}"
        self.metrics = RolloutMetrics(run="run", group="main")
        self._fetcher = WeightFetcher(WeightFiles(self._learner, RolloutGauges(self.metrics)))
        self.manifest = self.weights = None

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
        self.manifest = await self.manifest_after(PATIENCE_S)
        for shard in self.manifest.other_shards:  # rank 0 alone is without a server
            shard.folder = ELSEWHERE
        self.weights = await self._fetcher.fetch(self.manifest)

    def tensors(self):
        return tensors_of(self.weights.payload)


def follow(ranks, run_dir):
    """A rank other than 0, as its process runs it."""
    rank = Rank(ranks)
    policy = PolicyOnRanks(
        ranks=ranks,
        model=rank.model,
        tokenizer=None,
        update=CountingUpdate(rank.model),
        commands=rank.commands,
    )
    given = options(run_dir, plain_text=True)
    policy.update.close = lambda: None
    environment = RankEnvironment(rank=ranks.rank, size=ranks.size)
    asyncio.run(_follow(policy, given, environment, run_in(run_dir)))


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
        return follow(ranks, self.run_dir)

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
    is_equal, bases = [], []
    for version in range(4):
        if version:
            await leader.begin_next()
        await worker.take()
        bases.append(worker.weights.changes and worker.weights.changes.base_policy_version)
        await leader.publication.join()
        held, expected = worker.tensors(), await leader.on_ranks("gather", leader.gather)
        is_equal.append(
            held.keys() == expected.keys()
            and all(torch.equal(held[name], each) for name, each in expected.items())
        )
    return is_equal, bases, len(leader.policies.content)


def test_a_worker_that_fetches_from_two_ranks_has_every_version_bit_for_bit(tmp_path):
    work = Publishing(publish_four, tmp_path)
    (_, (is_equal, bases, size_bytes)), none = run_ranks(2, work)
    assert is_equal == [True] * 4
    assert bases == [None, 0, 1, 2]  # versions 1 to 3 are deltas, of each shard
    assert none is None
    # Rank 0 holds its half, and no more.
    num_parameters = sum(each.numel() for each in llama().parameters())
    assert 2 * num_parameters // 2 <= size_bytes < 2 * num_parameters * 3 // 4


def rank_1_dies_before_it_reports_version_2(begun):
    """It is killed when workers can read its files, and rank 0 has begun to wait for it."""
    exchange = publication_module.exchange_shards

    def fatal(ranks, version, own=None):
        if version == 2:
            begun.read_bytes()
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(ranks, version, own)

    publication_module.exchange_shards = fatal


async def lose_version_2(leader, worker, *, begun):
    """Publish versions until one is lost; what a worker has and hears then."""
    await worker.take()
    await leader.begin_next()
    await worker.take()
    await leader.begin_next()
    begun.write_bytes(b"")
    # As the training loop waits for a batch that only the next version would bring.
    with pytest.raises(LostRankError) as lost:
        await leader.publication.unless_it_fails(asyncio.Event().wait())
    newest = await worker.manifest_after(0.0)
    return str(lost.value), newest.policy_version, leader.policies.newest.policy_version


def test_a_version_of_a_rank_that_dies_between_the_phases_is_never_announced(tmp_path):
    os.mkfifo(begun := tmp_path / "begun")
    rank_1_dies = partial(rank_1_dies_before_it_reports_version_2, begun)
    work = Publishing(partial(lose_version_2, begun=begun), tmp_path / "1", rank_1_dies)
    leader, lost = end_ranks(2, work, timeout_s=30)
    assert lost.status == -signal.SIGKILL
    assert leader.error == ""
    incarnation, (cause, told, held) = leader.result
    assert cause.startswith("version 2 is not announced")
    assert "a rank is gone, or did not report within 30 s" in cause
    assert (told, held) == (1, 1)
    # The ranks start again, as what supervises them has them do, and publish as another learner.
    work = Publishing(publish_four, tmp_path / "2")
    (another, (is_equal, _, _)), _ = run_ranks(2, work)
    assert another != incarnation
    assert is_equal == [True] * 4
