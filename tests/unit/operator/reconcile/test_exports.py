"""What the operator exports of a run follows its status, from its creation to its deletion."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fixtures.operator.reconciler import ReconcilerFixture, reconciler_fixture
from tests.fixtures.operator.runs import KEY, signals
from vcpo_operator.cluster_api.certificates import first_end_s, renewed_certificates
from vcpo_operator.observed.access import secret_data

CERTIFICATE_END = "vcpo_run_certificate_end_timestamp_seconds"
RUN = f"/apis/vcpo.dev/v1alpha1/namespaces/{KEY.namespace}/vcporuns/{KEY.name}"


@pytest.fixture(name="operator")
async def reconciler() -> AsyncIterator[ReconcilerFixture]:
    async with reconciler_fixture() as operator:
        yield operator


async def test_a_deleted_run_leaves_nothing(operator: ReconcilerFixture):
    operator.create_run()
    await operator.settle()
    operator.delete(RUN)
    await operator.reconcile()
    names = {
        each.name
        for family in operator.metrics.registry.collect()
        for each in family.samples
        if each.labels.get("run") == KEY.name
    }
    assert names == set()


async def test_a_throttle_is_counted_and_the_limit_is_exported(operator: ReconcilerFixture):
    operator.create_run()
    await operator.settle()
    operator.connections.signals = signals(ess_ratio_mean=0.01, step=51)
    await operator.reconcile()
    assert operator.exported("vcpo_run_max_policy_lag_steps") == {(): 8.0}
    assert operator.exported("vcpo_run_admission_lag_steps") == {(): 4.0}
    assert operator.exported("vcpo_run_throttles_total")["tighten",] == 1.0
    assert ("EssHealthy", "BelowFloor") in operator.exported("vcpo_run_condition_reason")


async def test_the_deadline_of_the_start_goes_with_the_first_step(operator: ReconcilerFixture):
    operator.create_run(startupDeadlineSeconds=600)
    started_s = operator.now_s
    await operator.settle()
    assert operator.exported("vcpo_run_startup_deadline_timestamp_seconds") == {}
    operator.schedule_pods()
    await operator.settle()
    deadline = operator.exported("vcpo_run_startup_deadline_timestamp_seconds")
    assert deadline == {(): started_s + 600.0}
    assert operator.exported("vcpo_run_start_timestamp_seconds") == {(): started_s}
    operator.now_s += 60.0
    operator.connections.signals = signals(step=1).at_age(2.0)
    await operator.settle()
    assert operator.exported("vcpo_run_startup_deadline_timestamp_seconds") == {}
    assert operator.exported("vcpo_run_signals_age_seconds") == {(): 2.0}


async def test_the_end_of_the_first_certificate_is_exported_also_of_a_secret_of_the_users(
    operator: ReconcilerFixture,
):
    operator.create_run()
    await operator.settle()
    made = secret_data(operator.get("", "secrets", "demo-tls"))
    assert operator.exported(CERTIFICATE_END) == {(): first_end_s(made, ["learner", "rollout"])}
    operator.create_secret("mine", renewed_certificates(made, {"tls": ["learner"]}, now_s=0.0))
    operator.change_run(pods={"tlsSecretName": "mine"})
    operator.now_s += 60.0
    await operator.settle()
    assert operator.exported(CERTIFICATE_END) == {(): 90 * 86_400.0}
    operator.change_run(pods={"tlsSecretName": None, "transport": "PlainText"})
    operator.now_s += 60.0
    await operator.settle()
    assert operator.exported(CERTIFICATE_END) == {}


async def test_a_spec_that_cannot_be_used_is_seen_in_the_conditions(operator: ReconcilerFixture):
    operator.create_run(environment={"name": "sort_digits", "parameters": {"digit": 5}})
    await operator.reconcile()
    assert operator.exported("vcpo_run_condition_reason") == {
        ("Accepted", "InvalidSpec"): 1.0,
        ("Ready", "InvalidSpec"): 1.0,
    }
    assert operator.exported("vcpo_run_info") == {}
