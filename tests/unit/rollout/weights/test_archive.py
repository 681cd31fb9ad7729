"""A joining worker reads the learner's archive, or asks elsewhere if that is damaged."""

import asyncio
import os

import pytest

from benchmarks.harness.changes import prepare
from tests.fixtures.learner.dispatcher import INCARNATION
from tests.fixtures.rollout.policy_versions import FailingService, payload_of, store_of
from tests.fixtures.rollout.worker import serve_services
from vcpo.api.workloads import Weights
from vcpo.metrics import RolloutMetrics
from vcpo.wire.v1 import policy_pb2_grpc
from vcpo_learner.weights.archive import open_archive
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient
from vcpo_rollout.weights.archive import ArchiveReader
from vcpo_rollout.weights.fetcher import WeightFetcher


def settings(folder, *, every=3):
    return Weights.model_validate({"archiveUrl": str(folder), "archiveAnchorEverySteps": every})


class ArchiveFixture:
    """A learner that publishes and archives versions."""

    def __init__(self, folder, *, every=3):
        self.folder = folder
        self.store = store_of()
        self.archive_writer = open_archive(settings(folder, every=every), "run", self.store)

    async def publish(self, *versions, archive=True):
        for version in versions:
            policy = prepare(self.store, version, payload_of(version))
            self.store.publish(policy)
            if archive:
                await self.archive_writer.offer(policy)

    def files(self):
        return sorted(path.name for path in (self.folder / "run" / INCARNATION).iterdir())

    async def join(self, url=None, *, times=1):
        """A worker that joins; its weights, and the bytes of them by source."""
        service = FailingService(self.store, self.archive_writer)
        metrics = RolloutMetrics(run="run", group="main")
        async with serve_services(
            lambda server: policy_pb2_grpc.add_PolicyServiceServicer_to_server(service, server)
        ) as channel:
            learner = LearnerClient(channel, worker_id="w", rollout_group="main")
            reader = ArchiveReader(url or str(self.folder), "run")
            fetcher = WeightFetcher(learner, RolloutGauges(metrics), archive=reader)
            for _ in range(times):
                manifest = await learner.newest_policy(None, wait_s=0)
            weights = await fetcher.fetch(manifest)
        labels = {"run": "run", "group": "main"}
        name = "vcpo_rollout_weight_sync_bytes_total"
        value = metrics.registry.get_sample_value
        sources = ("archive", "learner")
        return weights, {each: value(name, labels | {"source": each}) or 0 for each in sources}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "archive"


async def test_a_joining_worker_reads_the_anchor_and_the_deltas_from_there(folder):
    fixture = ArchiveFixture(folder)
    await fixture.publish(0, 1, 2)
    assert fixture.files() == [
        "00000000-00000001.delta",
        "00000000.full",
        "00000001-00000002.delta",
    ]
    weights, num_bytes = await fixture.join()
    assert weights.shards[0].payload == payload_of(2)
    assert weights.changes is None
    assert num_bytes["learner"] == 0
    assert num_bytes["archive"] == sum(
        path.stat().st_size for path in (folder / "run" / INCARNATION).iterdir()
    )


async def test_workers_of_another_user_may_read_the_archive_of_a_private_learner(
    folder, monkeypatch
):
    monkeypatch.setenv("VCPO_USER_UMASK", "22")
    before = os.umask(0o077)  # as `keep_files_private` has it
    try:
        fixture = ArchiveFixture(folder)
        await fixture.publish(0, 1)
    finally:
        os.umask(before)
    found = {path.stat().st_mode & 0o777 for path in folder.rglob("*")}
    assert found == {0o755, 0o644}


async def test_there_is_an_anchor_every_so_many_versions_and_the_last_two_stay(folder):
    fixture = ArchiveFixture(folder, every=2)
    await fixture.publish(*range(7))
    assert [name for name in fixture.files() if name.endswith(".full")] == [
        "00000004.full",
        "00000006.full",
    ]
    assert (await fixture.join())[0].shards[0].payload == payload_of(6)


async def test_the_delta_of_a_version_left_out_is_written_with_the_next_one(folder):
    fixture = ArchiveFixture(folder, every=100)
    await fixture.publish(0, 1)
    await fixture.publish(2, archive=False)
    await fixture.publish(3)
    assert "00000001-00000002.delta" in fixture.files()
    assert "00000002-00000003.delta" in fixture.files()
    assert (await fixture.join())[0].shards[0].payload == payload_of(3)


async def test_a_version_without_deltas_from_the_one_written_is_an_anchor(folder):
    fixture = ArchiveFixture(folder, every=100)
    await fixture.publish(0)
    await fixture.publish(2000)  # every element differs
    assert fixture.files() == ["00000000.full", "00002000.full"]


async def test_an_anchor_that_was_patched_while_it_was_written_is_read_with_the_later_deltas(
    folder,
):
    fixture = ArchiveFixture(folder)
    await fixture.publish(0, archive=False)
    patched = fixture.store.newest
    policy = prepare(fixture.store, 1, payload_of(1))
    await fixture.archive_writer.offer(patched)
    assert fixture.archive_writer.archived is None
    fixture.store.publish(policy)
    await fixture.archive_writer.offer(policy)
    assert fixture.files() == ["00000000-00000001.delta", "00000000.full"]
    assert fixture.archive_writer.archived.policy_version == 1
    weights, num_bytes = await fixture.join()
    assert weights.shards[0].payload == payload_of(1)
    assert num_bytes["learner"] == 0


async def test_the_newest_of_the_versions_that_come_while_one_is_written_is_what_can_be_read(
    folder,
):
    fixture = ArchiveFixture(folder)
    policies = []
    for version in range(4):
        policies.append(prepare(fixture.store, version, payload_of(version)))
        fixture.store.publish(policies[-1])
    writes = [fixture.archive_writer.offer(policy) for policy in policies]
    await asyncio.gather(*writes)
    assert fixture.archive_writer.archived.policy_version == 3
    assert (await fixture.join())[0].shards[0].payload == payload_of(3)


async def test_a_version_that_is_not_archived_yet_comes_from_elsewhere(folder):
    fixture = ArchiveFixture(folder)
    await fixture.publish(0)
    await fixture.publish(1, archive=False)
    weights, num_bytes = await fixture.join()
    assert weights.shards[0].payload == payload_of(1)
    assert num_bytes == {"archive": 0, "learner": len(payload_of(1))}


async def test_a_holder_is_offered_deltas_and_not_the_archive(folder):
    fixture = ArchiveFixture(folder)
    await fixture.publish(0, 1)
    service = FailingService(fixture.store, fixture.archive_writer)
    async with serve_services(
        lambda server: policy_pb2_grpc.add_PolicyServiceServicer_to_server(service, server)
    ) as channel:
        learner = LearnerClient(channel, worker_id="w", rollout_group="main")
        held = HeldPolicy(incarnation=INCARNATION, policy_version=0)
        manifest = await learner.newest_policy(held, wait_s=0)
    assert len(manifest.deltas) == 1
    assert not manifest.HasField("archived")


async def test_whoever_asks_twice_is_not_sent_to_the_archive_again(folder):
    fixture = ArchiveFixture(folder)
    await fixture.publish(0)
    _, num_bytes = await fixture.join(times=2)
    assert num_bytes["archive"] == 0


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut", "folder"])
async def test_what_the_archive_lacks_comes_from_elsewhere(folder, damage):
    fixture = ArchiveFixture(folder)
    await fixture.publish(0, 1)
    file = folder / "run" / INCARNATION / "00000000.full"
    content = file.read_bytes()
    match damage:
        case "missing":
            file.unlink()
        case "flipped":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "cut":
            file.write_bytes(content[:100])
    url = str(folder / "elsewhere") if damage == "folder" else None
    weights, num_bytes = await fixture.join(url)
    assert weights.shards[0].payload == payload_of(1)
    assert num_bytes == {"archive": 0, "learner": len(payload_of(1))}


async def test_a_storage_that_takes_nothing_stops_nobody(folder):
    fixture = ArchiveFixture(folder)
    await fixture.publish(0)
    (folder / "run" / INCARNATION / "00000000.full").unlink()
    (folder / "run" / INCARNATION).rmdir()
    (folder / "run" / INCARNATION).write_text("no folder any more")
    await fixture.publish(1)
    assert fixture.archive_writer.archived.policy_version == 0
    assert (await fixture.join())[0].shards[0].payload == payload_of(1)


async def test_any_storage_of_fsspec_will_do():
    store = store_of()
    archive_writer = open_archive(settings("memory://weights"), "run", store)
    policy = prepare(store, 0, payload_of(0))
    await archive_writer.offer(policy)
    manifest = policy.manifest
    manifest.archived.CopyFrom(archive_writer.archived)
    found = await ArchiveReader("memory://weights", "run").full_set(manifest)
    assert found == (payload_of(0), len(payload_of(0)))


def test_a_run_without_an_archive_has_none():
    assert open_archive(Weights(), "run", store_of()) is None


@pytest.mark.parametrize("url", ["nosuch://bucket", "/dev/null/folder"])
def test_an_archive_that_cannot_be_used_is_named_with_field_and_cure(url):
    with pytest.raises(ValueError, match=r"spec\.weights\.archiveUrl: cannot write to .*give a"):
        open_archive(settings(url), "run", store_of())


def test_a_relative_path_is_no_archive():
    with pytest.raises(ValueError, match="archiveUrl"):
        settings("weights")
