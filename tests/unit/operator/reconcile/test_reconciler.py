"""The reconciler on a fake API server: what is there in the end, whatever happened on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fixtures.operator.reconciler import Stage, stage
from tests.fixtures.operator.runs import report
from vcpo.wire.phase import RunPhase

ROLLOUTS = [{"name": "main", "minReplicas": 2, "maxReplicas": 6}]


@pytest.fixture(name="made")
async def made_stage() -> AsyncIterator[Stage]:
    async with stage() as made:
        yield made


async def test_a_run_gets_its_children_and_says_that_it_starts(made: Stage):
    made.create_run(rollouts=ROLLOUTS)
    await made.settle()
    assert sorted(made.children()) == [
        "configmaps/demo-config",
        "deployments/demo-rollout-main",
        "networkpolicies/demo",
        "persistentvolumeclaims/demo-learner",
        "poddisruptionbudgets/demo-learner",
        "poddisruptionbudgets/demo-rollout-main",
        "serviceaccounts/demo-workload",
        "services/demo-learner",
        "statefulsets/demo-learner",
    ]
    assert made.replicas() == 2
    assert made.condition("Ready") == ("False", "Initializing")


async def test_a_settled_run_is_never_written_again(made: Stage):
    made.create_run(rollouts=ROLLOUTS)
    await made.settle()
    before = len(made.writes())
    for _ in range(10):
        made.now_s += 60.0
        await made.look()
    assert len(made.writes()) == before


async def test_a_hundred_looks_follow_an_autoscaler_and_never_undo_it(made: Stage):
    made.create_run(rollouts=[{**ROLLOUTS[0], "minReplicas": 1, "scaling": "External"}])
    await made.settle()
    for turn in range(100):
        wanted = 1 + turn % 6
        made.ask(wanted)
        await made.look()
        assert made.replicas() == wanted
        scaler = made.get("vcpo.dev", "vcporolloutscalers", "demo-rollout-main")
        assert scaler["spec"]["replicas"] == wanted


async def test_a_hand_on_the_scale_is_adopted_within_the_bounds(made: Stage):
    made.create_run(rollouts=ROLLOUTS)
    await made.settle()
    made.scale(5)
    await made.settle()
    assert made.replicas() == 5
    assert made.run_status()["rollouts"][0]["desiredReplicas"] == 5


async def test_the_operator_proper_never_owns_the_replicas(made: Stage):
    made.create_run(rollouts=ROLLOUTS)
    await made.settle()
    body = made.get("apps", "deployments", "demo-rollout-main")
    owners = [
        entry["manager"]
        for entry in body["metadata"]["managedFields"]
        if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
    ]
    assert not owners


async def test_a_starving_learner_gets_more_workers(made: Stage):
    made.create_run(rollouts=ROLLOUTS)
    await made.settle()
    made.now_s += 3600.0
    made.learner.says = report(learner_idle_ratio=0.5, step=50, ready_workers={"main": 2})
    await made.settle()
    assert made.replicas() > 2


async def test_a_low_ess_throttles_the_learner(made: Stage):
    made.create_run(rollouts=ROLLOUTS)
    await made.settle()
    made.learner.says = report(ess_ratio_mean=0.01, step=51)
    await made.look()
    assert made.learner.told == [4]


async def test_a_silent_learner_holds_everything(made: Stage):
    made.create_run(rollouts=ROLLOUTS)
    await made.settle()
    made.learner.says = report(learner_idle_ratio=1.0, step=50).aged(61.0)
    made.now_s += 3600.0
    await made.settle()
    assert made.replicas() == 2
    assert made.condition("SignalsFresh") == ("False", "Stale")


async def test_a_rest_and_its_end(made: Stage):
    made.create_run(rollouts=ROLLOUTS)
    await made.settle()
    made.change_run(suspend=True)
    await made.settle()
    assert made.replicas() == 0
    assert made.get("apps", "statefulsets", "demo-learner")["spec"]["replicas"] == 0
    made.change_run(suspend=False)
    await made.settle()
    assert made.replicas() == 2
    assert made.condition("Suspended") == ("False", "Active")


async def test_the_end_of_an_earlier_run_of_the_same_name_does_not_end_this_one(made: Stage):
    made.create_run(rollouts=ROLLOUTS)
    await made.settle()
    made.learner.says = report(step=10, phase=RunPhase.COMPLETE).aged(1.0)
    await made.settle()
    assert made.condition("Complete") == ("False", "NotFinished")
    made.now_s += 60.0
    await made.settle()
    assert made.condition("Complete") == ("True", "Succeeded")


async def test_a_complete_run_is_recorded_before_it_is_cleaned_up(made: Stage):
    made.create_run(rollouts=ROLLOUTS)
    await made.settle()
    made.learner.says = report(step=10, phase=RunPhase.COMPLETE)
    await made.look()
    assert made.condition("Complete") == ("True", "Succeeded")
    assert "statefulsets/demo-learner" in made.children()
    await made.settle()
    assert list(made.children()) == ["persistentvolumeclaims/demo-learner"]


async def test_an_ended_run_is_deleted_when_its_time_is_over(made: Stage):
    made.create_run(rollouts=ROLLOUTS, ttlSecondsAfterFinished=60)
    made.learner.says = report(step=10, phase=RunPhase.COMPLETE)
    await made.settle()
    made.now_s += 60.0
    await made.look()
    assert made.get("vcpo.dev", "vcporuns", "demo") == {}


async def test_a_run_that_does_not_start_in_time_fails(made: Stage):
    made.create_run(rollouts=ROLLOUTS, startupDeadlineSeconds=100)
    await made.settle()
    made.place_pods()
    await made.settle()
    made.now_s += 100.0
    await made.settle()
    assert made.condition("Failed") == ("True", "StartupDeadlineExceeded")
    assert list(made.children()) == ["persistentvolumeclaims/demo-learner"]


async def test_a_run_of_another_manager_is_left_alone(made: Stage):
    made.create_run(rollouts=ROLLOUTS, managedBy="other.dev/operator")
    outcome = await made.look()
    assert outcome.requeue_after_s is None
    assert (made.children(), made.writes()) == ({}, [])


async def test_a_parameter_that_the_environment_does_not_take_is_refused_and_named(made: Stage):
    task = {"name": "sort_digits", "parameters": {"digit": 5}}
    made.create_run(rollouts=ROLLOUTS, environment=task)
    await made.look()
    assert made.condition("Accepted") == ("False", "InvalidSpec")
    run = made.get("vcpo.dev", "vcporuns", "demo")
    (accepted,) = (each for each in run["status"]["conditions"] if each["type"] == "Accepted")
    assert "spec.environment.parameters.digit: 'sort_digits' has no such" in accepted["message"]
    assert made.children() == {}


async def test_a_template_that_cannot_be_merged_is_said_in_the_status(made: Stage):
    broken = {"spec": {"volumes": [{"emptyDir": {}}]}}
    made.create_run(rollouts=[{**ROLLOUTS[0], "template": broken}])
    assert not (await made.look()).error
    assert made.condition("Accepted") == ("False", "InvalidSpec")
    assert "each item of `spec.volumes` must have `name`" in made.message("Accepted")
    assert made.condition("Ready") == ("False", "InvalidSpec")


async def test_a_change_of_the_status_is_told_as_an_event(made: Stage):
    made.create_run(rollouts=ROLLOUTS)
    await made.settle()
    made.learner.says = report(step=10, phase=RunPhase.COMPLETE)
    await made.settle()
    events = made.server.api.store.objects(("", "events"), "ml")
    assert "Succeeded" in {event["reason"] for event in events}
