import asyncio

import pytest
import safetensors.torch
import torch

from benchmarks.harness.changes import prepare
from tests.fixtures.learner.dispatcher import INCARNATION, ManualClock, settle
from vcpo.wire.errors import NotFoundError
from vcpo_learner.weights.store import PolicyStore


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def store(clock):
    return PolicyStore(incarnation=INCARNATION, clock=clock)


def publish(store, version):
    payload = safetensors.torch.save({"weight": torch.full((2,), float(version))})
    store.publish(prepare(store, version, payload))


def newest(store, *, held=None, incarnation="", wait_s=0.0):
    return store.wait_for_newest(held_incarnation=incarnation, held_version=held, wait_s=wait_s)


async def test_whoever_holds_nothing_gets_the_newest_at_once(store):
    publish(store, 0)
    publish(store, 1)
    assert (await newest(store, wait_s=30)).manifest.policy_version == 1


async def test_a_holder_of_the_newest_waits_for_the_next(store):
    publish(store, 0)
    waiting = asyncio.create_task(newest(store, held=0, incarnation=INCARNATION, wait_s=30))
    await settle()
    assert not waiting.done()
    publish(store, 1)
    assert (await waiting).manifest.policy_version == 1


async def test_a_holder_of_the_newest_version_receives_it_again_when_its_wait_ends(store):
    publish(store, 4)
    policy = await newest(store, held=4, incarnation=INCARNATION)
    assert policy.manifest.policy_version == 4


async def test_a_version_of_another_incarnation_is_not_the_same_version(store):
    publish(store, 4)
    policy = await newest(store, held=4, incarnation="before", wait_s=30)
    assert policy.manifest.incarnation == INCARNATION


async def test_a_lower_version_after_a_restart_is_new(store):
    publish(store, 2)
    policy = await newest(store, held=9, incarnation="before", wait_s=30)
    assert policy.manifest.policy_version == 2


async def test_before_the_first_version_there_is_nothing_to_find(store):
    with pytest.raises(NotFoundError, match="no version has been published"):
        await newest(store)


async def test_waiting_for_the_first_version_ends_with_it(store):
    waiting = asyncio.create_task(newest(store, wait_s=30))
    await settle()
    publish(store, 0)
    assert (await waiting).manifest.policy_version == 0


def test_the_last_three_versions_can_be_fetched_and_no_older_one(store):
    for version in range(4):
        publish(store, version)
    assert store.get(INCARNATION, 1).manifest.policy_version == 1
    with pytest.raises(NotFoundError, match="policy_version: 0 is dropped"):
        store.get(INCARNATION, 0)


def test_a_version_of_another_incarnation_cannot_be_fetched(store):
    publish(store, 1)
    with pytest.raises(NotFoundError, match="ask for the newest"):
        store.get("before", 1)


def publish_sparse(store, *versions, size=1000):
    """Versions that differ in one element each."""
    for version in versions:
        weight = torch.zeros(size)
        weight[version] = 1.0
        payload = safetensors.torch.save({"weight": weight})
        store.publish(prepare(store, version, payload))


def chain(store, version, *, incarnation=INCARNATION):
    return [
        (delta.entry.base_policy_version, delta.entry.policy_version)
        for delta in store.deltas_from(incarnation, version)
    ]


def test_deltas_lead_from_a_version_to_the_newest(store):
    publish_sparse(store, 0, 1, 2, 3)
    assert chain(store, 1) == [(1, 2), (2, 3)]
    assert chain(store, 3) == []


def test_versions_that_differ_little_share_one_full_set_in_memory(store):
    publish_sparse(store, *range(4))
    sets = [store.get(INCARNATION, version).full_set for version in range(4)]
    assert all(each is sets[0] for each in sets)
    assert sets[0].file.read(0, 1) == (sets[0].buffer[:1], 3)
    assert safetensors.torch.load(bytes(sets[0].buffer))["weight"].tolist() == [
        float(element == 3) for element in range(1000)
    ]


def test_deltas_take_at_most_0_15_of_a_full_set(store):
    publish_sparse(store, *range(60))
    delta_bytes = store.get_delta(INCARNATION, 59, 58).file.size_bytes
    full_bytes = store.get(INCARNATION, 59).full_set.file.size_bytes
    most = full_bytes * 15 // 100 // delta_bytes
    assert len(chain(store, 59 - most)) == most
    assert chain(store, 59 - most - 1) == []


def test_a_version_without_deltas_onward_cannot_be_fetched_once_it_is_patched(store):
    publish_sparse(store, *range(60))
    with pytest.raises(NotFoundError):
        store.get(INCARNATION, 0)
    assert store.get(INCARNATION, 58).policy_version == 58


def test_a_delta_of_more_than_0_15_of_a_full_set_is_kept_until_the_next(store):
    weight = torch.zeros(1000)
    for version in range(3):
        weight[:400] += 1.0
        store.publish(prepare(store, version, safetensors.torch.save({"weight": weight})))
    assert chain(store, 1) == [(1, 2)]
    assert chain(store, 0) == []


def test_a_version_that_changes_too_much_has_no_delta_and_starts_a_new_chain(store):
    publish_sparse(store, 0, 1)
    publish(store, 2)
    publish(store, 3)
    assert chain(store, 1) == []
    with pytest.raises(NotFoundError, match="no delta from 1 to 2 is stored; fetch the full set"):
        store.get_delta(INCARNATION, 2, 1)


def test_deltas_of_another_incarnation_lead_nowhere(store):
    publish_sparse(store, 0, 1)
    assert chain(store, 0, incarnation="before") == []
    with pytest.raises(NotFoundError):
        store.get_delta("before", 1, 0)
