"""The whole operator, kopf included: it sees what changes, also after its watches were cut.

Cut watches and forgotten histories are the fake server's; the rest runs on a real one as well.
"""

import asyncio

import pytest

from tests.fakes.kubelet.client import ApiStatusError
from tests.fixtures.operator.server_scene import RUN, operator_scene, whole_operator

SERVICE = "/api/v1/namespaces/default/services/demo-learner"
PATIENCE_S = 30.0
POLL_S = 0.05


@pytest.fixture
async def scene(endpoint):
    async with operator_scene(endpoint) as started:
        yield started


@pytest.fixture
async def fake_scene():
    async with operator_scene() as started:
        yield started


async def until(condition):
    """Ask until the answer is yes; a real server has no other sign for all that a test may want."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(POLL_S)


async def generation_is_seen(scene, generation):
    """Wait until the run's status speaks of this generation."""

    async def is_seen():
        status = (await scene.run()).get("status") or {}
        return status.get("observedGeneration", 0) == generation

    await until(is_seen)


async def uid_of(scene, path):
    """Uid of an object; None when there is none."""
    try:
        return (await scene.client.get(path))["metadata"]["uid"]
    except ApiStatusError:
        return None


async def test_a_run_that_was_there_before_the_operator_is_looked_after(scene):
    await scene.create()
    async with whole_operator(scene):
        await generation_is_seen(scene, 1)


async def test_a_change_after_a_cut_watch_is_seen(fake_scene):
    await fake_scene.create()
    async with whole_operator(fake_scene):
        await generation_is_seen(fake_scene, 1)
        fake_scene.server.watches.close_all()
        await fake_scene.edit(suspend=True)
        await generation_is_seen(fake_scene, 2)


async def test_a_change_after_a_forgotten_history_is_seen(fake_scene):
    await fake_scene.create()
    async with whole_operator(fake_scene):
        await generation_is_seen(fake_scene, 1)
        fake_scene.server.watches.close_all()
        await fake_scene.edit(suspend=True)
        fake_scene.server.compact()
        await generation_is_seen(fake_scene, 2)


async def test_a_change_of_the_spec_is_seen(scene):
    await scene.create()
    async with whole_operator(scene):
        await generation_is_seen(scene, 1)
        await scene.edit(suspend=True)
        await generation_is_seen(scene, 2)


async def test_a_child_deleted_by_hand_comes_back(scene):
    await scene.create()
    async with whole_operator(scene):
        await generation_is_seen(scene, 1)
        before = await uid_of(scene, SERVICE)
        await scene.client.delete(SERVICE)

        async def is_back():
            return await uid_of(scene, SERVICE) not in (None, before)

        await until(is_back)


async def test_a_run_deleted_without_an_operator_leaves_nothing(scene):
    await scene.create()
    await scene.settle()
    await scene.client.delete(RUN)
    await scene.world.settled()
    claim = "persistentvolumeclaims/demo-learner"
    assert list(await scene.objects()) == [claim], "the model's volume alone outlives its run"
