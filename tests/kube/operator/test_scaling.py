"""Workers that the control loop or a person scales, and the reason of a throttle."""

import logging

import pytest

from tests.fixtures.operator.operator import DEPLOYMENT, operator_fixture, signals

NUM_ROUNDS = 20
GROUP = {"name": "main", "minReplicas": 1, "maxReplicas": 4}
REASON = "the ESS ratio is 25.0% of the on-policy ratio"


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


async def test_a_change_by_hand_within_the_bounds_is_adopted(operator):
    await operator.create(rollouts=[GROUP])
    await operator.settle()
    operator.connections.signals = signals()
    for _ in range(NUM_ROUNDS):
        operator.now_s += 5.0
        await operator.client.merge_patch(DEPLOYMENT, {"spec": {"replicas": 3}})
        await operator.reconcile()
    assert await operator.replicas() == 3


async def test_a_starving_learner_gets_another_worker_and_old_signals_change_nothing(operator):
    await operator.create(rollouts=[GROUP])
    await operator.settle()
    operator.now_s += 60.0
    starved = signals(learner_idle_ratio=0.6, ready_workers={"main": 1})
    operator.connections.signals = starved.at_age(3600.0)
    await operator.settle()
    assert await operator.replicas() == 1
    operator.connections.signals = starved
    await operator.reconcile()
    assert await operator.replicas() == 2


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
    for _ in range(3):
        await operator.edit(suspend=True)
        await operator.settle()
        assert await operator.replicas() == 0
        await operator.edit(suspend=False)
        await operator.settle()
        assert await operator.replicas() == 1


async def test_learner_log_and_status_have_the_reason_of_a_throttle(operator, caplog):
    caplog.set_level(logging.INFO, logger="vcpo_operator")
    await operator.create(algorithm={"maxPolicyLagSteps": 8}, control={"essFloorRatio": 0.5})
    await operator.settle()
    operator.connections.signals = signals(ess_ratio_mean=0.2)
    await operator.reconcile()
    assert operator.connections.throttles == [4]
    assert operator.connections.reasons == [REASON]
    logged = [record.getMessage() for record in caplog.records]
    assert any("Throttle" in line and REASON in line for line in logged)
    status = (await operator.run())["status"]
    decision = status["lastDecision"]
    assert {name: decision[name] for name in ("kind", "from", "to", "reason")} == {
        "kind": "Throttled",
        "from": 8,
        "to": 4,
        "reason": REASON,
    }
    assert status["admissionLagSteps"] == 4
    # A learner that restarted gets the limit in force with its reason, also from a new operator.
    operator.restart_operator()
    operator.connections.signals = signals(ess_ratio_mean=None, step=0)
    await operator.reconcile()
    assert operator.connections.throttles == [4, 4]
    assert operator.connections.reasons == [REASON, REASON]
