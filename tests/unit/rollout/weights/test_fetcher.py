"""Weights arrive whole or by deltas, through broken connections, and exactly or not at all."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.learner.scenes import INCARNATION
from tests.fixtures.rollout.scenes import quick_retries, served
from tests.fixtures.rollout.versions import TroubledService, flipped, payload_of, publish, store_of
from vcpo.metrics import RolloutMetrics
from vcpo.wire.v1 import policy_pb2_grpc
from vcpo.wire.weights import CorruptWeightsError
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient
from vcpo_rollout.weights.fetcher import WeightFetcher


class Scene:
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
async def a_scene(*versions):
    store = store_of(*versions)
    service = TroubledService(store)
    add = policy_pb2_grpc.add_PolicyServiceServicer_to_server
    async with served(lambda server: add(service, server)) as channel:
        yield Scene(store, service, channel)


async def test_whoever_holds_nothing_gets_the_full_set():
    async with a_scene(0, 1) as scene:
        weights = await scene.fetch()
    assert (weights.policy_version, weights.payload, weights.changes) == (1, payload_of(1), None)


async def test_whoever_holds_a_version_gets_the_deltas_from_there():
    async with a_scene(0) as scene:
        await scene.fetch()
        publish(scene.store, 3, 5)
        scene.service.num_bytes = 0
        weights = await scene.fetch(held=0)
        assert scene.service.num_bytes < len(payload_of(5)) / 10
    assert weights.payload == payload_of(5)
    assert weights.changes.base_policy_version == 0
    ((name, positions),) = weights.changes.positions.items()
    assert (name, positions.tolist()) == ("layer.weight", [0, 1, 2, 3, 4])


async def test_elements_that_change_twice_stand_once_among_the_changes():
    async with a_scene(1) as scene:
        await scene.fetch()
        publish(scene.store, 0, 2)
        weights = await scene.fetch(held=1)
    (positions,) = weights.changes.positions.values()
    assert positions.tolist() == [0, 1]
    assert weights.payload == payload_of(2)


async def test_a_version_retired_meanwhile_is_told_apart_from_a_corrupt_one():
    async with a_scene(0) as scene:
        manifest = await scene.manifest()
        publish(scene.store, 1, 2, 3)
        assert await scene.fetcher.fetch(manifest) is None


@pytest.mark.parametrize("held", [None, 0], ids=["whole", "delta"])
@settings(deadline=None, max_examples=15)
@given(offsets=st.lists(st.integers(0, 4000), max_size=3))
async def test_a_transfer_broken_anywhere_goes_on_where_it_stopped(held, offsets):
    async with a_scene(0) as scene:
        await scene.fetch()
        publish(scene.store, 7)
        manifest = await scene.manifest(held)
        scene.service.fetches.clear()
        scene.service.num_bytes = 0
        scene.service.troubles = [lambda data, at=at: data[: at % len(data)] for at in offsets]
        weights = await scene.fetcher.fetch(manifest)
        once = sum(delta.total_bytes for delta in manifest.deltas) or manifest.total_bytes
        assert scene.service.num_bytes == once
    assert weights.payload == payload_of(7)


@settings(deadline=None, max_examples=60)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
async def test_a_flipped_bit_of_a_delta_is_refused_or_changes_nothing(place, bit):
    async with a_scene(0) as scene:
        await scene.fetch()
        publish(scene.store, 7)
        scene.service.troubles = [flipped(place, bit)]
        try:
            weights = await scene.fetch(held=0)
        except CorruptWeightsError:
            return
    assert weights.payload == payload_of(7)


@settings(deadline=None, max_examples=30)
@given(place=st.integers(0, 3999), bit=st.integers(0, 7))
async def test_a_flipped_bit_of_a_full_set_is_refused_and_the_tensor_named(place, bit):
    async with a_scene(7) as scene:
        header_bytes = len(payload_of(7)) - 4000
        scene.service.troubles = [flipped(header_bytes + place, bit)]
        with pytest.raises(CorruptWeightsError, match=r"tensor 'layer\.weight': differs"):
            await scene.fetch()


async def test_a_flipped_value_of_a_delta_is_refused_and_the_tensor_named():
    async with a_scene(0) as scene:
        await scene.fetch()
        publish(scene.store, 7)
        scene.service.troubles = [flipped(-1, 0)]
        with pytest.raises(CorruptWeightsError, match=r"tensor 'layer\.weight': differs"):
            await scene.fetch(held=0)


async def test_deltas_from_another_version_than_the_held_one_are_refused():
    async with a_scene(0) as scene:
        await scene.fetch()
        publish(scene.store, 1, 2)
        with pytest.raises(CorruptWeightsError, match="from version 1, must start from 0"):
            await scene.fetch(held=1)


async def test_deltas_for_another_incarnation_are_refused():
    async with a_scene(0) as scene:
        await scene.fetch()
        publish(scene.store, 1)
        manifest = await scene.manifest(held=0)
        manifest.incarnation = "another"
        with pytest.raises(CorruptWeightsError, match="not held here"):
            await scene.fetcher.fetch(manifest)


async def test_a_held_set_that_is_no_longer_what_it_was_is_found_out():
    async with a_scene(0) as scene:
        await scene.fetch()
        publish(scene.store, 1)
        manifest = await scene.manifest(held=0)
        manifest.tensors[0].xxh3 ^= 1
        with pytest.raises(CorruptWeightsError, match="tensor 'layer"):
            await scene.fetcher.fetch(manifest)
        assert (await scene.fetch()).payload == payload_of(1)


async def test_a_transfer_that_ends_early_without_an_error_is_refused():
    async with a_scene(0) as scene:
        scene.service.troubles = [lambda data: None]
        manifest = await scene.manifest()
        manifest.total_bytes += 1
        with pytest.raises(CorruptWeightsError, match="stream ended after"):
            await scene.fetcher.fetch(manifest)
