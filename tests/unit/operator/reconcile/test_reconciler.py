"""The reconciler on a fake API server: the state that it reaches, and what it exports."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tests.fixtures.operator.operator import (
    DEFAULTS,
    KEY,
    RUN,
    OperatorFixture,
    operator_fixture,
    signals,
)
from vcpo.wire.phase import RunPhase
from vcpo_operator.cluster_api.run_secrets import first_end_s, renewed_certificates
from vcpo_operator.observed.access import secret_data

COMPLETE = signals(RunPhase.COMPLETE, step=10)
SECRETS = "/api/v1/namespaces/default/secrets"
CERTIFICATE_END = "vcpo_run_certificate_end_timestamp_seconds"
MADE = {
    "configmaps/demo-config",
    "deployments/demo-rollout-main",
    "networkpolicies/demo",
    "persistentvolumeclaims/demo-learner",
    "poddisruptionbudgets/demo-learner",
    "poddisruptionbudgets/demo-rollout-main",
    "secrets/demo-keys",
    "secrets/demo-tls",
    "serviceaccounts/demo-workload",
    "services/demo-learner",
    "statefulsets/demo-learner",
    "vcporuns/demo",
}


@pytest.fixture
async def operator() -> AsyncIterator[OperatorFixture]:
    async with operator_fixture() as started:
        yield started


async def test_a_run_gets_its_children_and_says_that_it_starts(operator: OperatorFixture):
    await operator.create()
    await operator.settle()
    assert set(await operator.objects()) == MADE
    assert (await operator.condition("Ready"))[:2] == ("False", "Initializing")


async def test_a_run_that_asks_for_a_second_monitor_of_its_pods_is_told_why_it_has_none(
    operator: OperatorFixture,
):
    operator.restart_operator(replace(DEFAULTS, shared_pod_monitor=True))
    await operator.create(pods={"podMonitor": True})
    await operator.settle()
    assert "podmonitors" not in {each.resource for each in operator.server.recorder.writes()}
    status, _, message = await operator.condition("Accepted")
    assert (status, "`pods.podMonitor`" in message) == ("True", True)


async def test_the_end_of_an_earlier_run_of_the_same_name_does_not_end_this_one(
    operator: OperatorFixture,
):
    await operator.create()
    await operator.settle()
    operator.connections.signals = COMPLETE.at_age(1.0)
    await operator.settle()
    assert (await operator.condition("Complete"))[:2] == ("False", "NotFinished")
    operator.now_s += 60.0
    await operator.settle()
    assert (await operator.condition("Complete"))[:2] == ("True", "Succeeded")


async def test_a_complete_run_is_recorded_before_it_is_cleaned_up_and_deleted_in_its_time(
    operator: OperatorFixture,
):
    await operator.create(ttlSecondsAfterFinished=60)
    await operator.settle()
    operator.connections.signals = COMPLETE
    await operator.reconcile()
    assert (await operator.condition("Complete"))[:2] == ("True", "Succeeded")
    assert "statefulsets/demo-learner" in await operator.objects()
    await operator.settle()
    assert "statefulsets/demo-learner" not in await operator.objects()
    operator.now_s += 60.0
    await operator.reconcile()
    assert set(await operator.objects()) == {"persistentvolumeclaims/demo-learner"}
    await operator.reconcile()
    assert operator.exported("vcpo_run_info") == {}


async def test_a_spec_that_cannot_be_used_is_named_and_seen_in_the_conditions(
    operator: OperatorFixture,
):
    await operator.create(environment={"name": "sort_digits", "parameters": {"digit": 5}})
    await operator.reconcile()
    status, reason, message = await operator.condition("Accepted")
    assert (status, reason) == ("False", "InvalidSpec")
    assert "spec.environment.parameters.digit: 'sort_digits' has no such" in message
    assert set(await operator.objects()) == {"vcporuns/demo"}
    assert operator.exported("vcpo_run_condition_reason") == {
        ("Accepted", "InvalidSpec"): 1.0,
        ("Ready", "InvalidSpec"): 1.0,
    }


async def test_a_run_that_collapsed_says_so_in_its_conditions_events_and_log(
    operator: OperatorFixture, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", logger="vcpo_operator")
    await operator.create()
    await operator.settle()
    operator.connections.signals = replace(COMPLETE, collapse="It fell.")
    await operator.settle()
    for kind, status in (("Complete", "True"), ("Ready", "True"), ("Stable", "False")):
        told = (status, "Collapsed", "All 10 steps are taken. It fell.")
        assert await operator.condition(kind) == told
    events = [(each["reason"], each["type"]) for each in await operator.events()]
    assert ("Collapsed", "Warning") in events
    logged = [
        (record.event, "Warning" if record.levelname == "WARNING" else "Normal")
        for record in caplog.records
        if hasattr(record, "event")
    ]
    assert sorted(logged) == sorted(events)


async def test_a_throttle_is_counted_and_the_limit_is_exported(operator: OperatorFixture):
    await operator.create()
    await operator.settle()
    operator.connections.signals = signals(ess_ratio_mean=0.01, step=51)
    await operator.reconcile()
    assert operator.exported("vcpo_run_max_policy_lag_steps") == {(): 8.0}
    assert operator.exported("vcpo_run_admission_lag_steps") == {(): 4.0}
    assert operator.exported("vcpo_run_throttles_total")["tighten",] == 1.0
    assert ("EssHealthy", "BelowFloor") in operator.exported("vcpo_run_condition_reason")


async def test_the_deadline_of_the_start_goes_with_the_first_step(operator: OperatorFixture):
    await operator.create(startupDeadlineSeconds=600)
    started_s, name = operator.now_s, "vcpo_run_startup_deadline_timestamp_seconds"
    await operator.settle()
    assert operator.exported(name) == {}
    for pod in await operator.pods():
        await operator.schedule(pod)
    await operator.settle()
    assert operator.exported(name) == {(): started_s + 600.0}
    assert operator.exported("vcpo_run_start_timestamp_seconds") == {(): started_s}
    operator.now_s += 60.0
    operator.connections.signals = signals(step=1).at_age(2.0)
    await operator.settle()
    assert operator.exported(name) == {}
    assert operator.exported("vcpo_run_signals_age_seconds") == {(): 2.0}


async def test_the_end_of_the_first_certificate_is_exported_also_of_a_secret_of_the_users(
    operator: OperatorFixture,
):
    await operator.create()
    await operator.settle()
    made = secret_data(await operator.client.get(f"{SECRETS}/demo-tls"))
    assert operator.exported(CERTIFICATE_END) == {(): first_end_s(made, ["learner", "rollout"])}
    mine = renewed_certificates(made, {"tls": ["learner"]}, now_s=0.0)
    data = {key: base64.b64encode(each).decode() for key, each in mine.items()}
    await operator.client.create(SECRETS, {"metadata": {"name": "mine"}, "data": data})
    await operator.edit(pods={"tlsSecretName": "mine"})
    operator.now_s += 60.0
    await operator.settle()
    assert operator.exported(CERTIFICATE_END) == {(): 90 * 86_400.0}


async def test_a_deleted_run_leaves_no_series(operator: OperatorFixture):
    await operator.create()
    await operator.settle()
    await operator.client.delete(RUN)
    await operator.reconcile()
    samples = [each for one in operator.metrics.registry.collect() for each in one.samples]
    assert not [each for each in samples if each.labels.get("run") == KEY.name]
