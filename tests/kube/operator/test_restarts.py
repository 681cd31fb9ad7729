"""An operator that was restarted goes on from what the one before it knew, and repeats nothing."""

import dataclasses

import pytest

from tests.fixtures.operator.server_scene import PODS, operator_scene, report
from vcpo_operator.observed.report import WorkerReport

EVENTS = "/api/v1/namespaces/default/events"
SIGNALS_MAX_AGE_S = 60
READY = {"type": "Ready", "status": "True"}


@pytest.fixture
async def scene(endpoint):
    async with operator_scene(endpoint) as started:
        yield started


async def train(scene):
    """Bring the run to where it trains."""
    await scene.create()
    await scene.settle()
    pods = [body["metadata"]["name"] for body in (await scene.client.get(PODS))["items"]]
    for pod in pods:
        ready = {"status": {"phase": "Running", "conditions": [READY]}}
        await scene.client.merge_patch(f"{PODS}/{pod}/status", ready)
    workers = {pod: WorkerReport(in_flight=1, silent_s=0.0) for pod in pods}
    scene.lines.says = dataclasses.replace(report(), workers=workers)
    await scene.settle()
    assert await condition(scene, "Ready") == ("True", "Training")


async def condition(scene, kind):
    """Status and reason of a condition of the run."""
    conditions = (await scene.run())["status"]["conditions"]
    (found,) = [each for each in conditions if each["type"] == kind]
    return found["status"], found["reason"]


async def events_of_the_run(scene):
    """Names of the events about the run."""
    events = (await scene.client.get(EVENTS))["items"]
    return {
        event["metadata"]["name"]
        for event in events
        if event["involvedObject"]["kind"] == "VCPORun"
    }


async def test_a_fresh_operator_that_has_not_reached_the_learner_yet_changes_no_condition(scene):
    await train(scene)
    before, told = (await scene.run())["status"]["conditions"], await events_of_the_run(scene)
    scene.restart_operator()
    scene.lines.says = None
    for _ in range(4):
        await scene.look()
        scene.now_s += SIGNALS_MAX_AGE_S / 4
    assert (await scene.run())["status"]["conditions"] == before
    assert await events_of_the_run(scene) == told


FAILING = {"failures_in_a_row": 1000, "latest_generation_failure": "It has no tokenizer."}
UNCHANGED = {"no_update": "The last 5 steps made no update."}


@pytest.mark.parametrize(
    ("said", "ready"),
    [(FAILING, ("False", "GenerationFailing")), (UNCHANGED, ("True", "NoUpdate"))],
)
async def test_what_the_learner_said_of_its_work_stands_until_a_fresh_operator_hears_it(
    scene, said, ready
):
    await train(scene)
    scene.lines.says = heard = dataclasses.replace(scene.lines.says, **said)
    await scene.settle()
    assert await condition(scene, "Ready") == ready
    before, told = (await scene.run())["status"]["conditions"], await events_of_the_run(scene)
    scene.restart_operator()
    for says in (None, None, heard):
        scene.lines.says = says
        await scene.look()
        assert (await scene.run())["status"]["conditions"] == before
        scene.now_s += 1.0
    assert await events_of_the_run(scene) == told


async def test_a_part_that_is_lost_is_told_before_a_fresh_operator_hears_the_learner(scene):
    await train(scene)
    scene.lines.says = dataclasses.replace(scene.lines.says, **UNCHANGED)
    await scene.settle()
    scene.restart_operator()
    scene.lines.says = None
    unready = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    await scene.client.merge_patch(f"{PODS}/demo-learner-0/status", unready)
    await scene.settle()
    assert await condition(scene, "Ready") == ("False", "Degraded")


async def test_a_learner_that_a_fresh_operator_never_reaches_is_told_in_the_end(scene):
    await train(scene)
    scene.restart_operator()
    scene.lines.says = None
    await scene.look()
    scene.now_s += SIGNALS_MAX_AGE_S + 1.0
    await scene.settle()
    assert await condition(scene, "SignalsFresh") == ("False", "Missing")
    assert await condition(scene, "Ready") == ("False", "Degraded")


async def test_a_learner_that_was_never_heard_of_is_missing_from_the_first_look_on(scene):
    await scene.create()
    await scene.look()
    assert await condition(scene, "SignalsFresh") == ("False", "Missing")
