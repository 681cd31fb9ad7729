import asyncio

import pytest
import safetensors.torch
import torch

from tests.unit.learner.scenes import INCARNATION, ManualClock, settle
from vcpo.wire.errors import NotFoundError
from vcpo_learner.policies import PolicyStore


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def store(clock):
    return PolicyStore(incarnation=INCARNATION, clock=clock)


def publish(store, version):
    payload = safetensors.torch.save({"weight": torch.full((2,), float(version))})
    store.publish(store.prepare(version, payload))


def newest(store, *, held=None, incarnation="", wait_s=0.0):
    return store.newest(held_incarnation=incarnation, held_version=held, wait_s=wait_s)


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


async def test_a_holder_of_the_newest_whose_time_is_up_is_told_of_it_again(store):
    publish(store, 4)
    policy = await newest(store, held=4, incarnation=INCARNATION)
    assert policy.manifest.policy_version == 4


async def test_a_version_of_another_incarnation_is_not_the_same_version(store):
    publish(store, 4)
    policy = await newest(store, held=4, incarnation="before", wait_s=30)
    assert policy.manifest.incarnation == INCARNATION


async def test_a_lower_version_after_a_restart_is_news(store):
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
    with pytest.raises(NotFoundError, match="policy_version: 0 is retired"):
        store.get(INCARNATION, 0)


def test_a_version_of_another_incarnation_cannot_be_fetched(store):
    publish(store, 1)
    with pytest.raises(NotFoundError, match="ask for the newest"):
        store.get("before", 1)
