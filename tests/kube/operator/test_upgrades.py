"""What an upgrade of the operator and an edit of the run do to the pods of a run that trains."""

import dataclasses

import pytest

from tests.fixtures.operator.operator import DEFAULTS, operator_fixture, signals
from vcpo.wire.phase import RunPhase

CONFIG = "/api/v1/namespaces/default/configmaps/demo-config"
UPGRADED = dataclasses.replace(DEFAULTS, learner_image="learner:2", scrape_annotations=False)


@pytest.fixture
async def operator(endpoint):
    async with operator_fixture(endpoint) as started:
        yield started


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


@pytest.mark.parametrize(("policy", "image"), [("OnRestart", "learner:2"), ("Never", "learner:1")])
async def test_a_run_that_resumes_has_the_pods_that_its_policy_says(operator, policy, image):
    await operator.train(upgradePolicy=policy)
    operator.restart_operator(UPGRADED)
    operator.connections.signals = None
    await operator.edit(suspend=True)
    await operator.settle()
    await operator.edit(suspend=False)
    await operator.settle()
    assert await images(operator) == {image, "rollout:1"}


async def test_a_run_that_recreates_has_the_pods_of_the_upgraded_operator_at_once(operator):
    await operator.train(upgradePolicy="Recreate")
    operator.restart_operator(UPGRADED)
    await operator.settle()
    assert await images(operator) == {"learner:2", "rollout:1"}


async def test_an_edit_of_the_pods_replaces_them(operator):
    await operator.train()
    before = await uids(operator)
    await operator.edit(learner={"threads": 3})
    await operator.settle()
    assert not before & await uids(operator)


async def test_more_steps_replace_no_pod_until_the_learner_has_taken_the_old_number(operator):
    await operator.train()
    before = await uids(operator)
    await operator.edit(steps=20)
    await operator.settle()
    assert await uids(operator) == before
    assert (await operator.condition("UpToDate"))[1] == "RevisionPending"
    operator.connections.signals = signals(RunPhase.COMPLETE)
    await operator.reconcile()
    await operator.reconcile()  # the old learner's last signals are still the newest
    await operator.settle()
    assert not before & await uids(operator)
    assert (await operator.condition("Complete"))[0] == "False"
    operator.now_s += 2.0
    await operator.start_pods()
    operator.connections.signals = signals(RunPhase.COMPLETE, step=20)
    await operator.settle()
    assert (await operator.condition("Complete"))[0] == "True"
