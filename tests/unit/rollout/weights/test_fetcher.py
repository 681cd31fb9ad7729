"""Weights arrive whole or by deltas, through broken connections, exactly or not at all."""

import asyncio
import contextlib
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import INCARNATION, ManualClock
from tests.fixtures.rollout.policy_versions import (
    cut_at,
    flip_bit,
    payload_of,
    served_versions,
    weight_files,
)
from tests.fixtures.weight_changes import prepare, store_in_process
from vcpo.metrics import RolloutMetrics
from vcpo.wire.deltas import chain_to
from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.weights.receiver import TornWeightsError, WeightFetcher


class Worker:
    """A fetcher that asks the learner for its newest version."""

    def __init__(self, learner, **options):
        self.learner = learner
        self.metrics = RolloutMetrics(run="run", group="main")
        self.fetcher = WeightFetcher(weight_files(self.metrics, **options))

    async def fetch(self, manifest=None):
        return await self.fetcher.fetch(manifest or self.learner.manifest())

    def num_bytes(self, source):
        labels = {"run": "run", "group": "main", "source": source}
        name = "vcpo_rollout_weight_sync_bytes_total"
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.contextmanager
def learner_and_worker(*versions):
    with served_versions(*versions) as learner:
        yield learner, Worker(learner)


async def test_whoever_holds_nothing_gets_the_full_set_and_the_deltas_after_it():
    with learner_and_worker(0, 1) as (learner, worker):
        weights = await worker.fetch()
        assert learner.requested() == ["00000000-00000001.delta", "00000000.full"]
    assert (weights.policy_version, weights.payload, weights.changes) == (
        1,
        payload_of(1),
        None,
    )


async def test_whoever_holds_a_version_gets_the_deltas_from_there():
    with learner_and_worker(0) as (learner, worker):
        await worker.fetch()
        learner.publish(3, 5)
        learner.num_bytes = 0
        weights = await worker.fetch()
        assert learner.num_bytes < len(payload_of(5)) / 10
    assert weights.payload == payload_of(5)
    assert weights.changes.base_policy_version == 0
    ((name, positions),) = weights.changes.positions.items()
    assert (name, positions.tolist()) == ("layer.weight", [0, 1, 2, 3, 4])


async def test_a_worker_that_is_too_far_behind_gets_the_full_set():
    with learner_and_worker(0) as (learner, worker):
        await worker.fetch()
        learner.publish(*range(1, 90))
        learner.requested()
        weights = await worker.fetch()
        *deltas, full = learner.requested()
        assert full.endswith(".full")
        assert all(each.endswith(".delta") for each in deltas)
    assert (weights.payload, weights.changes) == (payload_of(89), None)


@pytest.mark.parametrize("is_held", [False, True], ids=["whole", "delta"])
@settings(deadline=None, max_examples=15)
@given(offsets=st.lists(st.integers(0, 4000), max_size=3))
async def test_a_transfer_broken_anywhere_resumes_where_it_stopped(is_held, offsets):
    with learner_and_worker(0) as (learner, worker):
        if is_held:
            await worker.fetch()
            learner.publish(7)
        manifest = learner.manifest()
        learner.num_bytes, learner.failures = 0, [cut_at(each) for each in offsets]
        for _ in offsets:
            assert await worker.fetch(manifest) is None
        weights = await worker.fetch(manifest)
        once = sum(delta.total_bytes for delta in manifest.deltas) or manifest.total_bytes
        assert (
            learner.num_bytes
            == once
            == worker.num_bytes("server") - (manifest.total_bytes if is_held else 0)
        )
    assert weights.payload == payload_of(7 if is_held else 0)


@settings(deadline=None, max_examples=60)
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
async def test_a_flipped_bit_of_a_delta_is_refused_or_changes_nothing(position, bit):
    with learner_and_worker(0) as (learner, worker):
        await worker.fetch()
        learner.publish(7)
        learner.failures = [flip_bit(position, bit)]
        try:
            weights = await worker.fetch()
        except CorruptWeightsError:
            return
    assert weights.payload == payload_of(7)


@settings(deadline=None, max_examples=30)
@given(position=st.integers(0, 3999), bit=st.integers(0, 7))
async def test_a_flipped_bit_of_a_full_set_is_refused_and_the_tensor_named(position, bit):
    with learner_and_worker(7) as (learner, worker):
        header_bytes = len(payload_of(7)) - 4000
        learner.failures = [flip_bit(header_bytes + position, bit)]
        with pytest.raises(CorruptWeightsError, match=r"tensor 'layer\.weight': differs"):
            await worker.fetch()
        assert (await worker.fetch()).payload == payload_of(7)


def patched_while_read(learner, cuts):
    """A failure: the learner publishes a version at each place of the file."""
    path = learner.root / learner.store.incarnation / "0" / "00000000.full"

    def read(data):
        with path.open("rb", buffering=0) as file:
            sent = b""
            for version, cut in cuts:
                sent += file.read(cut - len(sent))
                learner.publish(version)
            return sent + file.read()

    return read


@settings(deadline=None, max_examples=40)
@given(data=st.data())
async def test_a_set_that_is_patched_while_it_is_read_is_completed_by_the_deltas_from_there(data):
    number = data.draw(st.integers(1, 4))
    versions = data.draw(st.sets(st.integers(1, 300), min_size=number, max_size=number))
    cuts = data.draw(st.lists(st.integers(80, 800), min_size=number, max_size=number))
    with learner_and_worker() as (learner, worker):
        learner.store.publish(prepare(learner.store, 0, payload_of(0), in_memory=True))
        learner.failures = [
            patched_while_read(learner, list(zip(sorted(versions), sorted(cuts), strict=True)))
        ]
        with contextlib.suppress(TornWeightsError):
            assert (await worker.fetch()).payload == payload_of(0)
        learner.requested()
        weights = await worker.fetch()
        is_whole, deltas = chain_to(learner.manifest(), 0)
        assert len(learner.requested()) == is_whole + len(deltas)
    assert weights.payload == payload_of(max(versions))


async def torn(learner, worker):
    """The worker has a set that was patched while it was read."""
    learner.store.publish(prepare(learner.store, 0, payload_of(0), in_memory=True))
    learner.failures = [patched_while_read(learner, [(900, 1000)])]
    with pytest.raises(TornWeightsError, match=r"tensor 'layer\.weight': differs"):
        await worker.fetch()
    learner.requested()


async def test_a_set_that_was_completed_is_no_change_of_what_the_engine_has():
    with learner_and_worker() as (learner, worker):
        await torn(learner, worker)
        assert (await worker.fetch()).changes is None
        learner.publish(901)
        assert (await worker.fetch()).changes.base_policy_version == 900


async def test_a_set_that_deltas_do_not_complete_is_thrown_away():
    with learner_and_worker() as (learner, worker):
        await torn(learner, worker)
        learner.failures = [flip_bit(-1, 0)]
        with pytest.raises(CorruptWeightsError, match=r"tensor 'layer\.weight': differs"):
            await worker.fetch()
        assert (await worker.fetch()).payload == payload_of(900)
        assert learner.requested() == ["00000000-00000900.delta", "00000900.full"]


async def test_another_incarnations_deltas_do_not_complete_a_set():
    with learner_and_worker() as (learner, worker):
        await torn(learner, worker)
        learner.restart("another")
        learner.publish(0, 1)
        assert (await worker.fetch()).payload == payload_of(1)
        assert learner.requested() == ["00000000-00000001.delta", "00000000.full"]


async def test_a_full_set_that_a_wrong_delta_spoiled_is_no_base_for_the_next():
    with learner_and_worker(0) as (learner, worker):
        await worker.fetch()
        learner.publish(7)
        learner.failures = [flip_bit(-1, 0)]
        with pytest.raises(CorruptWeightsError, match=r"tensor 'layer\.weight': differs"):
            await worker.fetch()
        learner.requested()
        assert (await worker.fetch()).payload == payload_of(7)
        assert learner.requested() == ["00000000-00000007.delta", "00000000.full"]


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ((5, 2, 3), "starts at version 1, must start at 5"),
        ((1, 5, 3), "starts at version 2, must start at 5"),
    ],
)
async def test_deltas_that_do_not_follow_each_other_are_refused(versions, problem):
    with learner_and_worker(0, 1, 2, 3) as (learner, worker):
        manifest = learner.manifest()
        for delta, version in zip(manifest.deltas, versions, strict=True):
            delta.policy_version = version
        with pytest.raises(CorruptWeightsError, match=problem):
            await worker.fetch(manifest)


async def test_a_full_set_from_which_no_deltas_lead_on_is_refused():
    with learner_and_worker(0, 1) as (learner, worker):
        manifest = learner.manifest()
        manifest.full_set_version = 9
        with pytest.raises(CorruptWeightsError, match="full_set_version: no deltas lead from 9"):
            await worker.fetch(manifest)


async def test_what_broke_off_is_not_completed_by_another_incarnations_bytes():
    with learner_and_worker(0) as (learner, worker):
        learner.failures = [cut_at(1000)]
        assert await worker.fetch() is None
        learner.restart("another")
        learner.publish(0)
        assert (await worker.fetch()).payload == payload_of(0)
        assert [offset for _, offset in learner.requests] == [0, 0]


async def test_a_file_of_another_size_is_refused():
    with learner_and_worker(0) as (learner, worker):
        manifest = learner.manifest()
        manifest.total_bytes += 1
        with pytest.raises(CorruptWeightsError, match=r"full: must be .* bytes, is"):
            await worker.fetch(manifest)


async def test_a_size_beyond_all_memory_is_refused():
    with learner_and_worker(0) as (learner, worker):
        manifest = learner.manifest()
        manifest.total_bytes = 1 << 62
        with pytest.raises(CorruptWeightsError, match="total_bytes: must fit into memory"):
            await worker.fetch(manifest)


async def test_whoever_sees_the_folder_reads_in_place_and_asks_no_server():
    with learner_and_worker(0, 1) as (learner, worker):
        manifest = learner.manifest()
        manifest.folder = str(learner.root / INCARNATION / "0")
        weights = await worker.fetch(manifest)
        assert learner.requested() == []
        assert worker.num_bytes("store") == manifest.total_bytes + manifest.deltas[0].total_bytes
        learner.store_folder.keep([])
        assert await Worker(learner).fetch(manifest) is None
    assert weights.payload == payload_of(1)


async def test_an_object_store_is_read_by_its_url_and_corrupt_files_are_refused():
    store = store_in_process(INCARNATION, ManualClock())
    for version in (0, 1):
        store.publish(prepare(store, version, payload_of(version)))
    manifest = store.newest
    worker = Worker(None)
    assert (await worker.fetch(manifest)).payload == payload_of(1)
    assert worker.num_bytes("store") > manifest.total_bytes
    files = store._folder._files
    path = f"{store._folder._path}/00000000.full"
    files.pipe_file(path, flip_bit(-1, 0)(files.cat_file(path)))
    with pytest.raises(CorruptWeightsError, match="tensor 'layer"):
        await Worker(None).fetch(manifest)


async def test_a_server_that_cannot_be_reached_is_reported_once(caplog):
    with learner_and_worker(0) as (learner, worker):
        manifest = learner.manifest()
    for _ in range(3):
        assert await worker.fetch(manifest) is None
    (line,) = caplog.messages
    assert "version 0 cannot be read: ConnectionRefusedError" in line


async def test_a_silent_server_is_given_up_and_a_cancelled_worker_waits_for_no_server(monkeypatch):
    monkeypatch.setattr("vcpo_rollout.transport.weight_files.SILENCE_S", 0.05)
    with learner_and_worker(0) as (learner, worker):
        silent = threading.Event()

        def says_nothing(data):
            silent.wait()
            return data[:100]

        learner.failures = [says_nothing]
        assert await worker.fetch() is None
        silent.set()
        assert (await worker.fetch()).policy_version == 0
        silent.clear()
        learner.failures = [says_nothing]
        fetching = asyncio.create_task(Worker(learner).fetch())
        while learner.failures:
            await asyncio.sleep(0.001)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        silent.set()
