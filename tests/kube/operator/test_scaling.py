"""Who scales what: a hundred looks at a run while somebody else changes its workers."""

import itertools

import pytest

from tests.fixtures.operator.server_scene import DEPLOYMENT, operator_scene, report

NUM_LOOKS = 100
SCALER = "/apis/vcpo.dev/v1alpha1/namespaces/default/vcporolloutscalers/demo-rollout-main"
GROUP = {"name": "main", "minReplicas": 1, "maxReplicas": 4}


@pytest.fixture
async def scene(endpoint):
    async with operator_scene(endpoint) as started:
        yield started


async def scale(scene, replicas):
    """What a HorizontalPodAutoscaler does."""
    await scene.client.merge_patch(f"{DEPLOYMENT}/scale", {"spec": {"replicas": replicas}})


def owners_of_replicas(deployment):
    managers = deployment["metadata"]["managedFields"]
    return {
        entry["manager"]
        for entry in managers
        if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
    }


async def ask(scene, replicas):
    """What a HorizontalPodAutoscaler does: it scales the group's scaler."""
    await scene.client.merge_patch(f"{SCALER}/scale", {"spec": {"replicas": replicas}})


async def test_an_autoscaler_is_followed_and_never_reverted(scene):
    await scene.create(rollouts=[{**GROUP, "scaling": "External"}])
    await scene.settle()
    scene.lines.says = report()
    for _, replicas in zip(range(NUM_LOOKS), itertools.cycle([3, 1, 4, 2]), strict=False):
        await ask(scene, replicas)
        scene.now_s += 5.0
        await scene.look()
        assert await scene.replicas() == replicas
        assert (await scene.client.get(SCALER))["spec"]["replicas"] == replicas


async def test_an_autoscaler_sees_its_workers_through_the_scale_of_the_scaler(scene):
    await scene.create(rollouts=[{**GROUP, "scaling": "External"}])
    await scene.settle()
    await ask(scene, 3)
    await scene.settle()
    shown = await scene.client.get(f"{SCALER}/scale")
    assert shown["status"]["replicas"] == 3
    assert "vcpo.dev/run=demo" in shown["status"]["selector"]
    assert "vcpo.dev/group=main" in shown["status"]["selector"]


async def test_a_group_that_is_handed_to_an_autoscaler_keeps_its_workers(scene):
    await scene.create(rollouts=[GROUP])
    await scene.settle()
    await scale(scene, 3)
    await scene.edit(rollouts=[{**GROUP, "scaling": "External"}])
    await scene.settle()
    assert (await scene.client.get(SCALER))["spec"]["replicas"] == 3
    assert await scene.replicas() == 3


async def test_a_suspended_group_rests_whatever_its_autoscaler_asks_for(scene):
    await scene.create(rollouts=[{**GROUP, "scaling": "External"}])
    await scene.edit(suspend=True)
    await scene.settle()
    await ask(scene, 3)
    await scene.settle()
    assert await scene.replicas() == 0
    await scene.edit(suspend=False)
    await scene.settle()
    assert await scene.replicas() == 3


async def test_the_operator_never_owns_the_replicas_of_a_group_that_others_scale(scene):
    await scene.create(rollouts=[{**GROUP, "scaling": "External"}])
    await scene.settle()
    await ask(scene, 3)
    await scene.edit(rollouts=[{**GROUP, "scaling": "External", "image": "rollout:2"}])
    await scene.settle()
    for path in (DEPLOYMENT, SCALER):
        assert "vcpo-operator" not in owners_of_replicas(await scene.client.get(path))


async def test_a_change_by_hand_within_the_bounds_is_adopted(scene):
    await scene.create(rollouts=[GROUP])
    await scene.settle()
    scene.lines.says = report()
    for _ in range(NUM_LOOKS):
        scene.now_s += 5.0
        await scale(scene, 3)
        await scene.look()
    assert await scene.replicas() == 3


async def test_a_starving_learner_gets_another_worker(scene):
    await scene.create(rollouts=[GROUP])
    await scene.settle()
    scene.now_s += 60.0
    scene.lines.says = report(learner_idle_ratio=0.6, ready_workers={"main": 1})
    await scene.look()
    assert await scene.replicas() == 2


async def test_an_ess_under_its_floor_halves_the_admission_lag(scene):
    await scene.create(algorithm={"maxPolicyLagSteps": 8}, control={"essFloorRatio": 0.5})
    await scene.settle()
    scene.lines.says = report(ess_ratio_mean=0.2)
    await scene.look()
    assert scene.lines.throttles == [4]


async def test_old_signals_move_nothing(scene):
    await scene.create(rollouts=[GROUP])
    scene.lines.says = report(learner_idle_ratio=0.6, ready_workers={"main": 1})
    await scene.settle()
    scene.lines.says = scene.lines.says.aged(3600.0)
    scene.now_s += 3600.0
    await scene.settle()
    assert await scene.replicas() == 1


async def test_a_run_that_does_not_change_costs_no_write(scene):
    await scene.create(rollouts=[GROUP])
    scene.lines.says = report()
    await scene.rest()
    before = await scene.world.mark()
    for _ in range(NUM_LOOKS):
        scene.now_s += 36.0
        await scene.look()
    assert await scene.world.mark() == before


async def test_suspending_stops_every_worker_and_resuming_brings_them_back(scene):
    await scene.create(rollouts=[GROUP])
    for _ in range(10):
        await scene.edit(suspend=True)
        await scene.settle()
        assert await scene.replicas() == 0
        await scene.edit(suspend=False)
        await scene.settle()
        assert await scene.replicas() == 1


async def test_a_scaler_of_an_older_operators_name_makes_room_for_the_new_one(scene):
    await scene.create(rollouts=[{**GROUP, "name": "tail", "scaling": "External"}])
    await scene.settle()
    collection, name = SCALER.rpartition("/")[0], "demo-rollout-tail"
    new = await scene.client.get(f"{collection}/{name}")
    copied = {part: new["metadata"][part] for part in ("labels", "ownerReferences")}
    old = {**new, "metadata": {"name": "demo-tail", **copied}, "spec": {"group": "tail"}}
    del old["status"]
    await scene.client.create(collection, old)
    stale = {"status": {"replicas": 3, "selector": "stale=yes"}}
    await scene.client.merge_patch(f"{collection}/demo-tail/status", stale)
    await scene.client.merge_patch(f"{collection}/{name}/scale", {"spec": {"replicas": 4}})
    await scene.settle()
    left = (await scene.client.get(collection))["items"]
    assert [each["metadata"]["name"] for each in left] == [name]
    deployment = await scene.client.get(DEPLOYMENT.replace("rollout-main", "rollout-tail"))
    assert deployment["spec"]["replicas"] == 4
