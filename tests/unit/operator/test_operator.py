"""The whole operator in this process, kopf included, against a fake API server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest
from kubernetes import client

from tests.fixtures.kubernetes.waiting import until_stored
from tests.fixtures.operator.reconciler import ReconcilerFixture, reconciler_fixture
from tests.fixtures.operator.runs import DEFAULTS
from vcpo_operator.app import Operator, Options
from vcpo_operator.cluster_api.client import Cluster
from vcpo_operator.handlers import Health
from vcpo_operator.reconcile import loop
from vcpo_operator.reconcile.reconciler import Reconciler


@asynccontextmanager
async def run_operator(fixture: ReconcilerFixture, **options: Any) -> AsyncIterator[None]:
    settings = client.Configuration(host=fixture.server.url)
    cluster = Cluster(client.ApiClient(settings))
    operator = Operator(
        Options(defaults=DEFAULTS, **options),
        cluster,
        fixture.metrics,
        address_of=lambda key: "127.0.0.1:1",
        login=lambda **_: kopf.ConnectionInfo(server=fixture.server.url),
    )
    stop = asyncio.Event()
    started: asyncio.Future[asyncio.AbstractEventLoop] = asyncio.get_running_loop().create_future()

    async def operate(here: asyncio.AbstractEventLoop) -> None:
        here.call_soon_threadsafe(started.set_result, asyncio.get_running_loop())
        await operator.run(stop)

    # In a loop of its own: kopf waits, when it ends, for all tasks younger than itself, and the
    # server's connections would be among them.
    here = asyncio.get_running_loop()
    running = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(operate(here))))
    there = await started
    try:
        yield
    finally:
        there.call_soon_threadsafe(stop.set)
        await asyncio.wait_for(running, 20)
        cluster.close()


ROLLOUTS = [{"name": "main", "minReplicas": 2, "maxReplicas": 4}]


async def test_a_run_created_before_the_operator_started_is_reconciled():
    async with reconciler_fixture() as operator:
        operator.create_run(rollouts=ROLLOUTS)
        async with run_operator(operator):
            await until_stored(operator.server, lambda: operator.run_status().get("conditions"))
        assert operator.replicas() == 2


async def test_a_scrape_does_not_read_the_runs_while_the_operator_changes_them(
    monkeypatch: pytest.MonkeyPatch,
):
    threads = set()

    def lag_s(self: Reconciler) -> float:
        threads.add(threading.get_ident())
        return 7.0

    monkeypatch.setattr(Reconciler, "observed_write_lag_s", lag_s)
    monkeypatch.setattr(loop, "_GAUGES_PERIOD_S", 0.01)
    async with reconciler_fixture() as operator, asyncio.timeout(20):
        operator.create_run(rollouts=ROLLOUTS)
        async with run_operator(operator):
            await until_stored(operator.server, lambda: operator.run_status().get("conditions"))
            registry = operator.metrics.registry
            while registry.get_sample_value("vcpo_operator_watch_lag_seconds") != 7.0:
                await asyncio.sleep(0.01)
    assert threads
    assert threading.get_ident() not in threads  # which scraped


async def test_no_finalizer_and_no_annotation_is_put_on_a_run():
    async with reconciler_fixture() as operator:
        operator.create_run(rollouts=ROLLOUTS)
        async with run_operator(operator, namespaces=["ml"]):
            await until_stored(operator.server, lambda: operator.run_status().get("conditions"))
        metadata = operator.get("vcpo.dev", "vcporuns", "demo")["metadata"]
        assert not {"finalizers", "annotations"} & set(metadata)


OWNED = {
    "ConfigMap": "/api/v1/namespaces/ml/configmaps/demo-config",
    "Service": "/api/v1/namespaces/ml/services/demo-learner",
    "ServiceAccount": "/api/v1/namespaces/ml/serviceaccounts/demo-workload",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/ml/networkpolicies/demo",
    "PodDisruptionBudget": "/apis/policy/v1/namespaces/ml/poddisruptionbudgets/demo-learner",
    "StatefulSet": "/apis/apps/v1/namespaces/ml/statefulsets/demo-learner",
    "Deployment": "/apis/apps/v1/namespaces/ml/deployments/demo-rollout-main",
}


async def test_every_child_that_somebody_deletes_comes_back_at_once_with_an_event():
    def uid(kind: str) -> str | None:
        group, plural, name = _address(OWNED[kind])
        found = operator.get(group, plural, name).get("metadata", {}).get("uid")
        return None if found is None else str(found)

    async with reconciler_fixture() as operator, run_operator(operator):
        operator.create_run(rollouts=ROLLOUTS)
        await until_stored(operator.server, lambda: operator.run_status().get("conditions"))
        before = {kind: uid(kind) for kind in OWNED}
        assert None not in before.values()
        for path in OWNED.values():
            operator.delete(path)
        # The run is looked at every two seconds besides; no clock of the operator is turned here.
        await until_stored(
            operator.server, lambda: all(uid(kind) not in {None, before[kind]} for kind in OWNED)
        )
        await until_stored(operator.server, lambda: set(OWNED) <= recreated_kinds(operator))


def _address(path: str) -> tuple[str, str, str]:
    parts = path.split("/")
    return ("" if parts[1] == "api" else parts[2]), parts[-2], parts[-1]


def recreated_kinds(operator: ReconcilerFixture) -> set[str]:
    """Kinds that events call recreated."""
    events = operator.server.api.store.objects(("", "events"), "ml")
    told = (event["message"] for event in events if event["reason"] == "Recreated")
    return {message.split()[0] for message in told}


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ((0.0, 0.0, 0.0), ""),
        ((121.0, 0.0, 0.0), "a run has been due for 121 s"),
        ((0.0, 5.1, 0.0), "the event loop is 5.1 s late"),
        ((0.0, 0.0, 130.0), "the watch has not shown the operator's own write for 130 s"),
    ],
)
def test_liveness_names_what_is_stuck(numbers: tuple[float, ...], problem: str):
    wait_s, lag_s, echo_s = numbers
    health = Health(
        oldest_wait_s=lambda: wait_s, loop_lag_s=lambda: lag_s, observed_write_lag_s=lambda: echo_s
    )
    assert health.problem() == problem
