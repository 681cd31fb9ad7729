"""Weights arrive whole or by deltas, through broken connections, exactly or not at all."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.changes import prepare
from tests.fixtures.learner.dispatcher import INCARNATION
from tests.fixtures.rollout.policy_versions import (
    FailingService,
    flip_bit,
    payload_of,
    publish,
    store_of,
)
from tests.fixtures.rollout.worker import quick_retries, serve_services
from vcpo.metrics import RolloutMetrics
from vcpo.wire.v1 import policy_pb2_grpc
from vcpo.wire.weights import CorruptWeightsError
from vcpo_learner.shared_file import SharedFile
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient
from vcpo_rollout.weights.fetcher import WeightFetcher


class FetcherFixture:
    """A learner's store, the service in front of it, and a worker's fetcher."""

    def __init__(self, store, service, channel):
        self.store, self.service = store, service
        self.learner = LearnerClient(
            channel, worker_id="w", rollout_group="main", retries=quick_retries()
        )
        metrics = RolloutMetrics(run="run", group="main")
        self.fetcher = WeightFetcher(self.learner, RolloutGauges(metrics))

    async def manifest(self, held=None):
        policy = None if held is None else HeldPolicy(incarnation=INCARNATION, policy_version=held)
        return await self.learner.newest_policy(policy, wait_s=0)

    async def fetch(self, held=None):
        return await self.fetcher.fetch(await self.manifest(held))


@contextlib.asynccontextmanager
async def fetcher_fixture(*versions):
    store = store_of(*versions)
    service = FailingService(store)
    add = policy_pb2_grpc.add_PolicyServiceServicer_to_server
    async with serve_services(lambda server: add(service, server)) as channel:
        yield FetcherFixture(store, service, channel)


async def test_whoever_holds_nothing_gets_the_full_set():
    async with fetcher_fixture(0, 1) as fixture:
        weights = await fixture.fetch()
    assert (weights.policy_version, weights.shards[0].payload, weights.changes) == (
        1,
        payload_of(1),
        None,
    )


async def test_whoever_holds_a_version_gets_the_deltas_from_there():
    async with fetcher_fixture(0) as fixture:
        await fixture.fetch()
        publish(fixture.store, 3, 5)
        fixture.service.num_bytes = 0
        weights = await fixture.fetch(held=0)
        assert fixture.service.num_bytes < len(payload_of(5)) / 10
    assert weights.shards[0].payload == payload_of(5)
    assert weights.changes.base_policy_version == 0
    ((name, positions),) = weights.changes.positions.items()
    assert (name, positions.tolist()) == ("layer.weight", [0, 1, 2, 3, 4])


async def test_elements_that_change_twice_stand_once_among_the_changes():
    async with fetcher_fixture(1) as fixture:
        await fixture.fetch()
        publish(fixture.store, 0, 2)
        weights = await fixture.fetch(held=1)
    (positions,) = weights.changes.positions.values()
    assert positions.tolist() == [0, 1]
    assert weights.shards[0].payload == payload_of(2)


async def test_a_version_retired_meanwhile_is_distinguished_from_a_corrupt_one():
    async with fetcher_fixture(0) as fixture:
        manifest = await fixture.manifest()
        for version in (1, 2, 3):  # three full sets, without deltas between them
            payload = SharedFile.of(payload_of(version))
            fixture.store.publish(fixture.store.prepare(version, payload))
        assert await fixture.fetcher.fetch(manifest) is None


@pytest.mark.parametrize("held", [None, 0], ids=["whole", "delta"])
@settings(deadline=None, max_examples=15)
@given(offsets=st.lists(st.integers(0, 4000), max_size=3))
async def test_a_transfer_broken_anywhere_resumes_where_it_stopped(held, offsets):
    async with fetcher_fixture(0) as fixture:
        await fixture.fetch()
        publish(fixture.store, 7)
        manifest = await fixture.manifest(held)
        fixture.service.fetches.clear()
        fixture.service.num_bytes = 0
        fixture.service.failures = [lambda data, at=at: data[: at % len(data)] for at in offsets]
        weights = await fixture.fetcher.fetch(manifest)
        once = sum(delta.total_bytes for delta in manifest.deltas) or manifest.total_bytes
        assert fixture.service.num_bytes == once
    assert weights.shards[0].payload == payload_of(7)


@settings(deadline=None, max_examples=60)
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
async def test_a_flipped_bit_of_a_delta_is_refused_or_changes_nothing(position, bit):
    async with fetcher_fixture(0) as fixture:
        await fixture.fetch()
        publish(fixture.store, 7)
        fixture.service.failures = [flip_bit(position, bit)]
        try:
            weights = await fixture.fetch(held=0)
        except CorruptWeightsError:
            return
    assert weights.shards[0].payload == payload_of(7)


@settings(deadline=None, max_examples=30)
@given(position=st.integers(0, 3999), bit=st.integers(0, 7))
async def test_a_flipped_bit_of_a_full_set_is_refused_and_the_tensor_named(position, bit):
    async with fetcher_fixture(7) as fixture:
        header_bytes = len(payload_of(7)) - 4000
        fixture.service.failures = [flip_bit(header_bytes + position, bit)]
        with pytest.raises(CorruptWeightsError, match=r"tensor 'layer\.weight': differs"):
            await fixture.fetch()


async def test_a_flipped_value_of_a_delta_is_refused_and_the_tensor_named():
    async with fetcher_fixture(0) as fixture:
        await fixture.fetch()
        publish(fixture.store, 7)
        fixture.service.failures = [flip_bit(-1, 0)]
        with pytest.raises(CorruptWeightsError, match=r"tensor 'layer\.weight': differs"):
            await fixture.fetch(held=0)


async def test_deltas_from_another_version_than_the_held_one_are_refused():
    async with fetcher_fixture(0) as fixture:
        await fixture.fetch()
        publish(fixture.store, 1, 2)
        with pytest.raises(CorruptWeightsError, match="at version 1, must start at 0"):
            await fixture.fetch(held=1)


async def test_deltas_of_another_incarnation_are_left_and_its_full_set_is_asked_for():
    async with fetcher_fixture(0) as fixture:
        await fixture.fetch()
        publish(fixture.store, 1)
        manifest = await fixture.manifest(held=0)
        manifest.incarnation = "another"
        fixture.service.fetches.clear()
        assert await fixture.fetcher.fetch(manifest) is None
    (request,) = fixture.service.fetches
    assert (request.incarnation, request.HasField("base_policy_version")) == ("another", False)


async def test_a_held_set_that_is_no_longer_what_it_was_is_found_out():
    async with fetcher_fixture(0) as fixture:
        await fixture.fetch()
        publish(fixture.store, 1)
        manifest = await fixture.manifest(held=0)
        manifest.tensors[0].xxh3 ^= 1
        with pytest.raises(CorruptWeightsError, match="tensor 'layer"):
            await fixture.fetcher.fetch(manifest)
        assert (await fixture.fetch()).shards[0].payload == payload_of(1)


async def test_a_transfer_that_ends_early_without_an_error_is_refused():
    async with fetcher_fixture(0) as fixture:
        fixture.service.failures = [lambda data: None]
        manifest = await fixture.manifest()
        manifest.total_bytes += 1
        with pytest.raises(CorruptWeightsError, match="stream ended after"):
            await fixture.fetcher.fetch(manifest)


@settings(deadline=None, max_examples=15)
@given(num_bytes=st.integers(0, 4100))
async def test_a_full_set_that_is_patched_while_it_is_sent_becomes_the_newest_version(num_bytes):
    async with fetcher_fixture(4) as fixture:

        def patched(data):
            publish(fixture.store, 5, 6)
            return data[: num_bytes % len(data)]

        fixture.service.failures = [patched]
        assert await fixture.fetch() is None
        assert fixture.fetcher.base.policy_version == 4
        weights = await fixture.fetch(held=4)
    assert (weights.policy_version, weights.shards[0].payload, weights.changes) == (
        6,
        payload_of(6),
        None,
    )


async def test_a_mixture_up_to_a_version_that_is_not_announced_waits_for_that_one():
    async with fetcher_fixture(4) as fixture:
        coming = []

        def patched(data):
            publish(fixture.store, 5)
            coming.append(prepare(fixture.store, 6, payload_of(6)))
            return data[:100]

        fixture.service.failures = [patched]
        assert await fixture.fetch() is None
        assert await fixture.fetch(held=4) is None
        assert fixture.fetcher.base.policy_version == 5
        fixture.store.publish(coming[0])
        weights = await fixture.fetch(held=5)
    assert (weights.shards[0].payload, weights.changes) == (payload_of(6), None)


async def test_the_full_set_in_memory_is_patched_and_not_replaced():
    async with fetcher_fixture(0) as fixture:
        first = await fixture.fetch()
        publish(fixture.store, 1)
        second = await fixture.fetch(held=0)
    assert second.shards[0].payload is first.shards[0].payload
    assert second.shards[0].payload == payload_of(1)


async def test_a_full_set_that_a_wrong_delta_spoiled_is_no_base_for_the_next():
    async with fetcher_fixture(0) as fixture:
        await fixture.fetch()
        publish(fixture.store, 7)
        fixture.service.failures = [flip_bit(-1, 0)]
        with pytest.raises(CorruptWeightsError):
            await fixture.fetch(held=0)
        assert fixture.fetcher.base is None
        fixture.service.num_bytes = 0
        assert (await fixture.fetch(held=0)).shards[0].payload == payload_of(7)
        assert fixture.service.num_bytes == len(payload_of(7))
        assert (await fixture.fetch()).shards[0].payload == payload_of(7)


async def test_a_version_that_is_retired_leaves_the_base_as_it_is():
    async with fetcher_fixture(0) as fixture:
        await fixture.fetch()
        publish(fixture.store, 1)
        manifest = await fixture.manifest(held=0)
        publish(fixture.store, 2000)  # every element differs: the deltas are gone
        assert await fixture.fetcher.fetch(manifest) is None
        assert fixture.fetcher.base.policy_version == 0
        assert (await fixture.fetch()).shards[0].payload == payload_of(2000)
