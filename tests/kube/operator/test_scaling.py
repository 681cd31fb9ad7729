"""Workers that an autoscaler or a person scales while the operator reconciles."""

import itertools

import pytest

from tests.fixtures.operator.operator import DEPLOYMENT, operator_fixture, report

NUM_ROUNDS = 20
SCALER = "/apis/vcpo.dev/v1alpha1/namespaces/default/vcporolloutscalers/demo-rollout-main"
GROUP = {"name": "main", "minReplicas": 1, "maxReplicas": 4}


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


async def scale(operator, replicas):
    """What a HorizontalPodAutoscaler does."""
    await operator.client.merge_patch(f"{DEPLOYMENT}/scale", {"spec": {"replicas": replicas}})


def owners_of_replicas(deployment):
    managers = deployment["metadata"]["managedFields"]
    return {
        entry["manager"]
        for entry in managers
        if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
    }


async def ask(operator, replicas):
    """What a HorizontalPodAutoscaler does: it scales the group's scaler."""
    await operator.client.merge_patch(f"{SCALER}/scale", {"spec": {"replicas": replicas}})


async def test_an_autoscaler_is_followed_and_never_reverted(operator):
    await operator.create(rollouts=[{**GROUP, "scaling": "External"}])
    await operator.settle()
    operator.connections.report = report()
    for _, replicas in zip(range(NUM_ROUNDS), itertools.cycle([3, 1, 4, 2]), strict=False):
        await ask(operator, replicas)
        operator.now_s += 5.0
        await operator.reconcile()
        assert await operator.replicas() == replicas
        assert (await operator.client.get(SCALER))["spec"]["replicas"] == replicas


async def test_an_autoscaler_sees_its_workers_through_the_scale_of_the_scaler(operator):
    await operator.create(rollouts=[{**GROUP, "scaling": "External"}])
    await operator.settle()
    await ask(operator, 3)
    await operator.settle()
    shown = await operator.client.get(f"{SCALER}/scale")
    assert shown["status"]["replicas"] == 3
    assert "vcpo.dev/run=demo" in shown["status"]["selector"]
    assert "vcpo.dev/group=main" in shown["status"]["selector"]


async def test_a_group_that_is_handed_to_an_autoscaler_keeps_its_workers(operator):
    await operator.create(rollouts=[GROUP])
    await operator.settle()
    await scale(operator, 3)
    await operator.edit(rollouts=[{**GROUP, "scaling": "External"}])
    await operator.settle()
    assert (await operator.client.get(SCALER))["spec"]["replicas"] == 3
    assert await operator.replicas() == 3


async def test_a_suspended_group_rests_whatever_its_autoscaler_asks_for(operator):
    await operator.create(rollouts=[{**GROUP, "scaling": "External"}])
    await operator.edit(suspend=True)
    await operator.settle()
    await ask(operator, 3)
    await operator.settle()
    assert await operator.replicas() == 0
    await operator.edit(suspend=False)
    await operator.settle()
    assert await operator.replicas() == 3


async def test_the_operator_never_owns_the_replicas_of_a_group_that_others_scale(operator):
    await operator.create(rollouts=[{**GROUP, "scaling": "External"}])
    await operator.settle()
    await ask(operator, 3)
    await operator.edit(rollouts=[{**GROUP, "scaling": "External", "image": "rollout:2"}])
    await operator.settle()
    for path in (DEPLOYMENT, SCALER):
        assert "vcpo-operator" not in owners_of_replicas(await operator.client.get(path))


async def test_a_change_by_hand_within_the_bounds_is_adopted(operator):
    await operator.create(rollouts=[GROUP])
    await operator.settle()
    operator.connections.report = report()
    for _ in range(NUM_ROUNDS):
        operator.now_s += 5.0
        await scale(operator, 3)
        await operator.reconcile()
    assert await operator.replicas() == 3


async def test_a_starving_learner_gets_another_worker(operator):
    await operator.create(rollouts=[GROUP])
    await operator.settle()
    operator.now_s += 60.0
    operator.connections.report = report(learner_idle_ratio=0.6, ready_workers={"main": 1})
    await operator.reconcile()
    assert await operator.replicas() == 2


async def test_an_ess_under_its_floor_halves_the_admission_lag(operator):
    await operator.create(algorithm={"maxPolicyLagSteps": 8}, control={"essFloorRatio": 0.5})
    await operator.settle()
    operator.connections.report = report(ess_ratio_mean=0.2)
    await operator.reconcile()
    assert operator.connections.throttles == [4]


async def test_old_signals_move_nothing(operator):
    await operator.create(rollouts=[GROUP])
    operator.connections.report = report(learner_idle_ratio=0.6, ready_workers={"main": 1})
    await operator.settle()
    operator.connections.report = operator.connections.report.at_age(3600.0)
    operator.now_s += 3600.0
    await operator.settle()
    assert await operator.replicas() == 1


async def test_a_run_that_does_not_change_costs_no_write(operator):
    await operator.create(rollouts=[GROUP])
    operator.connections.report = report()
    await operator.settle_with_progress()
    before = await operator.backend.revision()
    for _ in range(NUM_ROUNDS):
        operator.now_s += 36.0
        await operator.reconcile()
    assert await operator.backend.revision() == before


async def test_suspending_stops_every_worker_and_resuming_brings_them_back(operator):
    await operator.create(rollouts=[GROUP])
    for _ in range(10):
        await operator.edit(suspend=True)
        await operator.settle()
        assert await operator.replicas() == 0
        await operator.edit(suspend=False)
        await operator.settle()
        assert await operator.replicas() == 1


async def test_a_scaler_of_an_older_operators_name_makes_room_for_the_new_one(operator):
    await operator.create(rollouts=[{**GROUP, "name": "tail", "scaling": "External"}])
    await operator.settle()
    collection, name = SCALER.rpartition("/")[0], "demo-rollout-tail"
    new = await operator.client.get(f"{collection}/{name}")
    copied = {part: new["metadata"][part] for part in ("labels", "ownerReferences")}
    old = {**new, "metadata": {"name": "demo-tail", **copied}, "spec": {"group": "tail"}}
    del old["status"]
    await operator.client.create(collection, old)
    stale = {"status": {"replicas": 3, "selector": "stale=yes"}}
    await operator.client.merge_patch(f"{collection}/demo-tail/status", stale)
    await operator.client.merge_patch(f"{collection}/{name}/scale", {"spec": {"replicas": 4}})
    await operator.settle()
    left = (await operator.client.get(collection))["items"]
    assert [each["metadata"]["name"] for each in left] == [name]
    deployment = await operator.client.get(DEPLOYMENT.replace("rollout-main", "rollout-tail"))
    assert deployment["spec"]["replicas"] == 4
