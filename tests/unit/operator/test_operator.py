"""The whole operator in this process, kopf included, against a fake API server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.kubernetes.waiting import until_stored
from tests.fixtures.operator.operator import RUN, operator_fixture, whole_operator
from vcpo_operator.handlers import Health

OWNED = {
    "ConfigMap": ("", "configmaps", "demo-config"),
    "Service": ("", "services", "demo-learner"),
    "ServiceAccount": ("", "serviceaccounts", "demo-workload"),
    "NetworkPolicy": ("networking.k8s.io", "networkpolicies", "demo"),
    "PodDisruptionBudget": ("policy", "poddisruptionbudgets", "demo-learner"),
    "StatefulSet": ("apps", "statefulsets", "demo-learner"),
    "Deployment": ("apps", "deployments", "demo-rollout-main"),
}


async def test_every_child_that_somebody_deletes_comes_back_at_once_with_an_event():
    async with operator_fixture() as operator, whole_operator(operator):
        store = operator.server.api.store

        def uid(kind: str) -> str | None:
            group, plural, name = OWNED[kind]
            found = store.get((group, plural), "default", name)
            return None if found is None else str(found["metadata"]["uid"])

        def recreated() -> set[str]:
            events = store.objects(("", "events"), "default")
            told = (each["message"] for each in events if each["reason"] == "Recreated")
            return {message.split()[0] for message in told}

        await operator.create()
        await until_stored(operator.server, lambda: None not in map(uid, OWNED))
        await until_stored(operator.server, lambda: has_status(store))
        before = {kind: uid(kind) for kind in OWNED}
        for group, plural, name in OWNED.values():
            version = {"networking.k8s.io": "v1", "policy": "v1", "apps": "v1"}.get(group)
            root = f"/apis/{group}/{version}" if group else "/api/v1"
            await operator.client.delete(f"{root}/namespaces/default/{plural}/{name}")
        # The run is looked at every two seconds besides; no clock of the operator is turned here.
        await until_stored(
            operator.server, lambda: all(uid(kind) not in {None, before[kind]} for kind in OWNED)
        )
        await until_stored(operator.server, lambda: set(OWNED) <= recreated())
        metadata = (await operator.client.get(RUN))["metadata"]
        assert not {"finalizers", "annotations"} & set(metadata)


def has_status(store) -> bool:
    body = store.get(("vcpo.dev", "vcporuns"), "default", "demo")
    return body is not None and bool(body.get("status"))


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


IMAGES = ("--learner-image=l", "--rollout-image=r")


def operate(folder: Path) -> subprocess.CompletedProcess[str]:
    """Start the operator where there is no service account, in an empty home."""
    (folder / "kubeconfig").write_text("")
    outside = {key: value for key, value in os.environ.items() if "KUBERNETES" not in key}
    places = {"HOME": str(folder), "KUBECONFIG": str(folder / "kubeconfig")}
    command = [sys.executable, "-m", "vcpo_operator", *IMAGES]
    command += ["--metrics-listen=127.0.0.1:0", "--liveness-listen=127.0.0.1:0"]
    return subprocess.run(
        command, env=outside | places, capture_output=True, text=True, timeout=60, check=False
    )


def test_without_a_cluster_the_operator_says_what_it_needs(tmp_path: Path):
    ended = operate(tmp_path)
    assert ended.returncode == 2
    assert " CRITICAL cannot reach the API server: " in ended.stderr
    assert "set KUBECONFIG to a kubeconfig that names a cluster" in ended.stderr
    assert "Traceback" not in ended.stderr
