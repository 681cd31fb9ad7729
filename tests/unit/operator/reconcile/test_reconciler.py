"""The reconciler on a fake API server: the state that it reaches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tests.fixtures.operator.reconciler import ReconcilerFixture, reconciler_fixture
from tests.fixtures.operator.runs import DEFAULTS, signals
from vcpo.wire.phase import RunPhase

ROLLOUTS = [{"name": "main", "minReplicas": 2, "maxReplicas": 6}]


@pytest.fixture(name="operator")
async def made_stage() -> AsyncIterator[ReconcilerFixture]:
    async with reconciler_fixture() as operator:
        yield operator


async def test_a_run_gets_its_children_and_says_that_it_starts(operator: ReconcilerFixture):
    operator.create_run(rollouts=ROLLOUTS)
    await operator.settle()
    assert sorted(operator.children()) == [
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
    assert operator.replicas() == 2
    assert operator.condition("Ready") == ("False", "Initializing")


async def test_a_run_that_asks_for_a_second_monitor_of_its_pods_is_told_why_it_has_none(
    operator: ReconcilerFixture,
):
    operator.restart(replace(DEFAULTS, shared_pod_monitor=True))
    operator.create_run(rollouts=ROLLOUTS, pods={"podMonitor": True})
    await operator.settle()
    assert "podmonitors" not in {write.resource for write in operator.writes()}
    assert "`pods.podMonitor`" in operator.message("Accepted")
    assert operator.condition("Accepted") == ("True", "Accepted")


async def test_the_end_of_an_earlier_run_of_the_same_name_does_not_end_this_one(
    operator: ReconcilerFixture,
):
    operator.create_run(rollouts=ROLLOUTS)
    await operator.settle()
    operator.connections.signals = signals(step=10, phase=RunPhase.COMPLETE).at_age(1.0)
    await operator.settle()
    assert operator.condition("Complete") == ("False", "NotFinished")
    operator.now_s += 60.0
    await operator.settle()
    assert operator.condition("Complete") == ("True", "Succeeded")


async def test_a_complete_run_is_recorded_before_it_is_cleaned_up(operator: ReconcilerFixture):
    operator.create_run(rollouts=ROLLOUTS)
    await operator.settle()
    operator.connections.signals = signals(step=10, phase=RunPhase.COMPLETE)
    await operator.reconcile()
    assert operator.condition("Complete") == ("True", "Succeeded")
    assert "statefulsets/demo-learner" in operator.children()
    await operator.settle()
    assert list(operator.children()) == ["persistentvolumeclaims/demo-learner"]


async def test_an_ended_run_is_deleted_when_its_time_is_over(operator: ReconcilerFixture):
    operator.create_run(rollouts=ROLLOUTS, ttlSecondsAfterFinished=60)
    operator.connections.signals = signals(step=10, phase=RunPhase.COMPLETE)
    await operator.settle()
    operator.now_s += 60.0
    await operator.reconcile()
    assert operator.get("vcpo.dev", "vcporuns", "demo") == {}


async def test_a_parameter_that_the_environment_does_not_take_is_refused_and_named(
    operator: ReconcilerFixture,
):
    task = {"name": "sort_digits", "parameters": {"digit": 5}}
    operator.create_run(rollouts=ROLLOUTS, environment=task)
    await operator.reconcile()
    assert operator.condition("Accepted") == ("False", "InvalidSpec")
    run = operator.get("vcpo.dev", "vcporuns", "demo")
    (accepted,) = (each for each in run["status"]["conditions"] if each["type"] == "Accepted")
    assert "spec.environment.parameters.digit: 'sort_digits' has no such" in accepted["message"]
    assert operator.children() == {}


async def test_a_template_that_cannot_be_merged_is_said_in_the_status(operator: ReconcilerFixture):
    broken = {"spec": {"volumes": [{"emptyDir": {}}]}}
    operator.create_run(rollouts=[{**ROLLOUTS[0], "template": broken}])
    assert not (await operator.reconcile()).error
    assert operator.condition("Accepted") == ("False", "InvalidSpec")
    assert "each item of `spec.volumes` must have `name`" in operator.message("Accepted")
    assert operator.condition("Ready") == ("False", "InvalidSpec")


async def test_a_change_of_the_status_is_an_event(operator: ReconcilerFixture):
    operator.create_run(rollouts=ROLLOUTS)
    await operator.settle()
    operator.connections.signals = signals(step=10, phase=RunPhase.COMPLETE)
    await operator.settle()
    events = operator.server.api.store.objects(("", "events"), "ml")
    assert "Succeeded" in {event["reason"] for event in events}


async def test_a_run_that_collapsed_says_so_in_its_conditions_and_warns_once(
    operator: ReconcilerFixture,
):
    operator.create_run(rollouts=ROLLOUTS)
    await operator.settle()
    operator.connections.signals = signals(step=10, phase=RunPhase.COMPLETE, collapse="It fell.")
    await operator.settle()
    for kind, status in (("Complete", "True"), ("Ready", "True"), ("Stable", "False")):
        assert operator.condition(kind) == (status, "Collapsed")
        assert operator.message(kind) == "All 10 steps are taken. It fell."
    events = operator.server.api.store.objects(("", "events"), "ml")
    (event,) = [each for each in events if each["reason"] == "Collapsed"]
    assert event["type"] == "Warning"
    assert event["message"] == "Complete: All 10 steps are taken. It fell."


async def test_every_event_is_a_line_of_the_log(
    operator: ReconcilerFixture, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", logger="vcpo_operator")
    operator.create_run(rollouts=ROLLOUTS)
    await operator.settle()
    operator.connections.signals = signals(step=10, phase=RunPhase.COMPLETE)
    await operator.settle()
    logged = [
        (record.event, record.levelname == "WARNING")
        for record in caplog.records
        if hasattr(record, "event")
    ]
    events = operator.server.api.store.objects(("", "events"), "ml")
    posted = [(event["reason"], event["type"] == "Warning") for event in events]
    assert posted
    assert sorted(logged) == sorted(posted)
