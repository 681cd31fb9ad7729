"""The whole operator, kopf included, when its watches are cut or have missed too much."""

import pytest

from tests.kube.kubelet_scene import until_stored
from tests.kube.operator_scene import KEY, RUN, operator_scene, whole_operator


@pytest.fixture
async def scene():
    async with operator_scene() as started:
        yield started


def generation_seen(scene):
    """Generation of the run that its status speaks of."""
    body = scene.server.api.store.get(("vcpo.dev", "vcporuns"), *KEY)
    return ((body or {}).get("status") or {}).get("observedGeneration", 0)


def exists(scene, resource, name):
    return scene.server.api.store.get(resource, KEY.namespace, name) is not None


async def test_a_run_that_was_there_before_the_operator_is_looked_after(scene):
    await scene.create()
    async with whole_operator(scene):
        await until_stored(scene.server, lambda: generation_seen(scene) == 1)


async def test_a_change_after_a_cut_watch_is_seen(scene):
    await scene.create()
    async with whole_operator(scene):
        await until_stored(scene.server, lambda: generation_seen(scene) == 1)
        scene.server.watches.close_all()
        await scene.edit(suspend=True)
        await until_stored(scene.server, lambda: generation_seen(scene) == 2)


async def test_a_change_after_a_forgotten_history_is_seen(scene):
    await scene.create()
    async with whole_operator(scene):
        await until_stored(scene.server, lambda: generation_seen(scene) == 1)
        scene.server.watches.close_all()
        await scene.edit(suspend=True)
        scene.server.compact()
        await until_stored(scene.server, lambda: generation_seen(scene) == 2)


async def test_a_child_deleted_by_hand_comes_back(scene):
    services = ("", "services")
    await scene.create()
    async with whole_operator(scene):
        await until_stored(scene.server, lambda: generation_seen(scene) == 1)
        await scene.client.delete("/api/v1/namespaces/default/services/demo-learner")
        await until_stored(scene.server, lambda: exists(scene, services, "demo-learner"))


async def test_a_run_deleted_without_an_operator_leaves_nothing(scene):
    await scene.create()
    await scene.settle()
    await scene.client.delete(RUN)
    await scene.server.settled()
    claim = "persistentvolumeclaims/demo-learner"
    assert list(scene.objects()) == [claim], "the model's volume alone outlives its run"
