import asyncio
import dataclasses
import logging

import pytest

from tests.fixtures.operator.operator import (
    DEFAULTS,
    PODS,
    operator_fixture,
    signals,
    whole_operator,
)


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


async def test_a_learner_that_is_evicted_says_who_evicts_it_and_its_run_does_not_fail(operator):
    await operator.train()
    operator.connections.signals = None
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    target |= {"message": "preempting for a pod"}
    await operator.schedule("demo-learner-0")
    path = f"{PODS}/demo-learner-0"
    await operator.client.merge_patch(f"{path}/status", {"status": {"conditions": [target]}})
    await operator.client.delete(path)
    await operator.settle()
    told = ("False", "PreemptionByScheduler", "pod demo-learner-0: preempting for a pod")
    assert await operator.condition("LearnerReady") == told
    run = (await operator.run())["status"]
    assert (run["reason"], run["learner"]["restarts"]) == ("PreemptionByScheduler", 0)
    told_of = {each["reason"]: each["type"] for each in await operator.events()}
    assert told_of["PreemptionByScheduler"] == "Normal"
    assert (await operator.condition("Failed"))[0] == "False"


async def test_a_learner_s_pod_that_no_kubelet_ends_has_lost_its_node(operator):
    await operator.create(learner={"drainSeconds": 1})
    await operator.settle()
    await operator.schedule("demo-learner-0")
    await operator.client.delete(f"{PODS}/demo-learner-0")
    operator.now_s += 3600.0
    await operator.settle()
    _, reason, message = await operator.condition("LearnerReady")
    assert reason == "NodeLost"
    assert message.startswith("pod demo-learner-0: its node node-0 does not answer")
    told_of = {each["reason"]: each["type"] for each in await operator.events()}
    assert told_of["NodeLost"] == "Warning"


PATIENCE_S = 30.0
POLL_S = 0.05


@pytest.fixture
async def fake_operator():
    async with operator_fixture() as started:
        yield started


async def until(condition):
    """Ask until the answer is yes; a real server has no other sign for all that a test may want."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(POLL_S)


async def generation_is_seen(operator, generation):
    """Wait until the run's status speaks of this generation."""

    async def is_seen():
        status = (await operator.run()).get("status") or {}
        return status.get("observedGeneration", 0) == generation

    await until(is_seen)


async def test_a_change_after_an_interrupted_watch_is_seen(fake_operator):
    await fake_operator.create()
    async with whole_operator(fake_operator):
        await generation_is_seen(fake_operator, 1)
        fake_operator.server.watches.close_all()
        await fake_operator.edit(suspend=True)
        await generation_is_seen(fake_operator, 2)


async def test_a_change_after_a_forgotten_history_is_seen(fake_operator):
    await fake_operator.create()
    async with whole_operator(fake_operator):
        await generation_is_seen(fake_operator, 1)
        fake_operator.server.watches.close_all()
        await fake_operator.edit(suspend=True)
        fake_operator.server.compact()
        await generation_is_seen(fake_operator, 2)


NUM_ROUNDS = 20
GROUP = {"name": "main", "minReplicas": 1, "maxReplicas": 4}
REASON = "the ESS ratio is 25.0% of the on-policy ratio"


async def test_a_run_that_does_not_change_costs_no_write(operator):
    await operator.create(rollouts=[GROUP])
    operator.connections.signals = signals()
    await operator.settle_with_progress()
    before = await operator.backend.revision()
    for _ in range(NUM_ROUNDS):
        operator.now_s += 36.0
        await operator.reconcile()
    assert await operator.backend.revision() == before


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


SIGNALS_MAX_AGE_S = 60


async def train(operator):
    """Bring the run to where it trains."""
    await operator.train()
    assert await condition(operator, "Ready") == ("True", "Training")


async def condition(operator, kind):
    """Status and reason of a condition of the run."""
    return (await operator.condition(kind))[:2]


async def events_of_the_run(operator):
    """Names of the events about the run."""
    return {each["metadata"]["name"] for each in await operator.events()}


async def test_a_fresh_operator_that_has_not_reached_the_learner_yet_changes_no_condition(operator):
    await train(operator)
    before, told = (await operator.run())["status"]["conditions"], await events_of_the_run(operator)
    operator.restart_operator()
    operator.connections.signals = None
    for _ in range(4):
        await operator.reconcile()
        operator.now_s += SIGNALS_MAX_AGE_S / 4
    assert (await operator.run())["status"]["conditions"] == before
    assert await events_of_the_run(operator) == told


FAILING = {"failures_in_a_row": 1000, "generation_failure": "It has no tokenizer."}
UNCHANGED = {"skipped": "low_ess", "skipped_steps": 12}


@pytest.mark.parametrize(
    ("said", "ready"),
    [(FAILING, ("False", "GenerationFailing")), (UNCHANGED, ("True", "NoUpdate"))],
)
async def test_what_the_learner_said_of_its_work_stands_until_a_fresh_operator_hears_it(
    operator, said, ready
):
    await train(operator)
    operator.connections.signals = heard = signals(**said)
    await operator.settle()
    assert await condition(operator, "Ready") == ready
    before, told = (await operator.run())["status"]["conditions"], await events_of_the_run(operator)
    operator.restart_operator()
    for says in (None, None, heard):
        operator.connections.signals = says
        await operator.reconcile()
        assert (await operator.run())["status"]["conditions"] == before
        operator.now_s += 1.0
    assert await events_of_the_run(operator) == told


async def test_a_learner_that_a_fresh_operator_never_reaches_is_reported_in_the_end(operator):
    await train(operator)
    operator.restart_operator()
    operator.connections.signals = None
    await operator.reconcile()
    operator.now_s += SIGNALS_MAX_AGE_S + 1.0
    await operator.settle()
    assert await condition(operator, "SignalsFresh") == ("False", "Missing")
    assert await condition(operator, "Ready") == ("False", "Degraded")


CONFIG = "/api/v1/namespaces/default/configmaps/demo-config"
UPGRADED = dataclasses.replace(DEFAULTS, learner_image="learner:2", scrape_annotations=False)


async def uids(operator):
    return {each["metadata"]["uid"] for each in (await operator.pods()).values()}


async def images(operator):
    pods = (await operator.pods()).values()
    return {each["spec"]["containers"][0]["image"] for each in pods}


async def test_an_upgraded_operator_replaces_no_pod_scales_them_and_says_what_waits(operator):
    await operator.train()
    before, file = await uids(operator), (await operator.client.get(CONFIG))["data"]
    operator.restart_operator(UPGRADED)
    await operator.settle()
    assert await uids(operator) == before
    assert (await operator.client.get(CONFIG))["data"] == file
    status, reason, message = await operator.condition("UpToDate")
    assert (status, reason) == ("False", "RevisionPending")
    assert "`upgradePolicy` 'OnRestart'" in message
    operator.now_s += 60.0
    operator.connections.signals = signals(learner_idle_ratio=0.6, ready_workers={"main": 1})
    await operator.settle()
    assert before < await uids(operator)
    assert await images(operator) == {"learner:1", "rollout:1"}


async def test_a_rolled_back_upgrade_leaves_nothing_that_waits(operator):
    await operator.train()
    before = await uids(operator)
    for defaults in (UPGRADED, DEFAULTS):
        operator.restart_operator(defaults)
        await operator.settle()
    assert await uids(operator) == before
    assert (await operator.condition("UpToDate"))[:2] == ("True", "Current")
