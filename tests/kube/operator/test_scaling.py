"""Workers that an autoscaler or a person scales while the operator reconciles."""

import itertools

import pytest

from tests.fixtures.operator.operator import DEPLOYMENT, operator_fixture, signals
from vcpo_operator.cluster_api.executor import Executor
from vcpo_operator.decisions.actions import Resume

NUM_ROUNDS = 20
GROUP = {"name": "main", "minReplicas": 1, "maxReplicas": 4}


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


async def scale(operator, replicas):
    """What a HorizontalPodAutoscaler or a person does."""
    await operator.client.merge_patch(f"{DEPLOYMENT}/scale", {"spec": {"replicas": replicas}})


def owners_of_replicas(deployment):
    managers = deployment["metadata"]["managedFields"]
    return {
        entry["manager"]
        for entry in managers
        if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
    }


async def test_an_autoscaler_is_followed_and_never_reverted(operator):
    await operator.create(rollouts=[{**GROUP, "scaling": "External"}])
    await operator.settle()
    operator.connections.signals = signals()
    for _, replicas in zip(range(NUM_ROUNDS), itertools.cycle([3, 0, 9, 1]), strict=False):
        await scale(operator, replicas)
        operator.now_s += 5.0
        await operator.reconcile()
        assert await operator.replicas() == replicas


async def test_a_new_pod_template_leaves_the_number_of_an_autoscaler(operator):
    await operator.create(rollouts=[{**GROUP, "scaling": "External"}])
    await operator.settle()
    await scale(operator, 3)
    await operator.edit(rollouts=[{**GROUP, "scaling": "External", "image": "rollout:2"}])
    await operator.settle()
    assert await operator.replicas() == 3


async def test_a_group_that_is_handed_to_an_autoscaler_keeps_its_workers(operator):
    await operator.create(rollouts=[GROUP])
    await operator.settle()
    await scale(operator, 3)
    await operator.edit(rollouts=[{**GROUP, "scaling": "External"}])
    await operator.settle()
    assert await operator.replicas() == 3


async def test_a_suspended_group_comes_back_with_the_workers_that_its_autoscaler_wanted(operator):
    await operator.create(rollouts=[{**GROUP, "scaling": "External"}])
    await operator.settle()
    await scale(operator, 3)
    await operator.edit(suspend=True)
    await operator.settle()
    assert await operator.replicas() == 0
    await scale(operator, 1)
    await operator.settle()
    assert await operator.replicas() == 0
    await operator.edit(
        suspend=False, rollouts=[{**GROUP, "scaling": "External", "image": "rollout:2"}]
    )
    await operator.settle()
    assert await operator.replicas() == 3
    await scale(operator, 0)
    await operator.settle()
    assert await operator.replicas() == 0


async def test_a_late_watch_does_not_undo_what_an_autoscaler_did_after_a_resumption(operator):
    await operator.create(rollouts=[{**GROUP, "scaling": "External"}])
    await operator.edit(suspend=True)
    await operator.settle()
    resting = await operator.client.get(DEPLOYMENT)
    await operator.edit(suspend=False)
    await operator.settle()
    await scale(operator, 4)
    late = Resume(
        name="demo-rollout-main",
        replicas=1,
        resource_version=resting["metadata"]["resourceVersion"],
    )
    await Executor(operator.cluster, operator.connections).execute(operator.key_of(), late)
    assert await operator.replicas() == 4


async def test_the_operator_never_owns_the_replicas_of_a_group_that_others_scale(operator):
    await operator.create(rollouts=[{**GROUP, "scaling": "External"}])
    await operator.edit(suspend=True)
    await operator.settle()
    await operator.edit(suspend=False)
    await operator.settle()
    await scale(operator, 3)
    await operator.edit(rollouts=[{**GROUP, "scaling": "External", "image": "rollout:2"}])
    await operator.settle()
    assert "vcpo-operator" not in owners_of_replicas(await operator.client.get(DEPLOYMENT))


async def test_a_change_by_hand_within_the_bounds_is_adopted(operator):
    await operator.create(rollouts=[GROUP])
    await operator.settle()
    operator.connections.signals = signals()
    for _ in range(NUM_ROUNDS):
        operator.now_s += 5.0
        await scale(operator, 3)
        await operator.reconcile()
    assert await operator.replicas() == 3


async def test_a_starving_learner_gets_another_worker(operator):
    await operator.create(rollouts=[GROUP])
    await operator.settle()
    operator.now_s += 60.0
    operator.connections.signals = signals(learner_idle_ratio=0.6, ready_workers={"main": 1})
    await operator.reconcile()
    assert await operator.replicas() == 2


async def test_an_ess_under_its_floor_halves_the_admission_lag(operator):
    await operator.create(algorithm={"maxPolicyLagSteps": 8}, control={"essFloorRatio": 0.5})
    await operator.settle()
    operator.connections.signals = signals(ess_ratio_mean=0.2)
    await operator.reconcile()
    assert operator.connections.throttles == [4]


async def test_old_signals_move_nothing(operator):
    await operator.create(rollouts=[GROUP])
    operator.connections.signals = signals(learner_idle_ratio=0.6, ready_workers={"main": 1})
    await operator.settle()
    operator.connections.signals = operator.connections.signals.at_age(3600.0)
    operator.now_s += 3600.0
    await operator.settle()
    assert await operator.replicas() == 1


async def test_a_run_that_does_not_change_costs_no_write(operator):
    await operator.create(rollouts=[GROUP])
    operator.connections.signals = signals()
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
