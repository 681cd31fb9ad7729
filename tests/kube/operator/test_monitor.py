"""`vcpo top` and `vcpo events` on a cluster: the real kubectl reads what the operator wrote."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

from tests.fixtures.kubernetes.kubectl import needs_kubectl, write_kubeconfig
from tests.fixtures.operator.operator import operator_fixture, report
from vcpo.monitor.cluster_runs import ClusterRuns
from vcpo.monitor.kubectl import KubectlError, Scope

pytestmark = needs_kubectl
NAMESPACE = "default"


@pytest.fixture
async def operator(endpoint, tmp_path, monkeypatch):
    """A throttled run, and a kubeconfig for its cluster."""
    async with operator_fixture(endpoint) as started:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(started.backend, tmp_path)))
        await started.create(algorithm={"maxPolicyLagSteps": 8}, control={"essFloorRatio": 0.5})
        await started.settle()
        started.connections.report = report(ess_ratio_mean=0.2, warning_score=0.75)
        await started.settle_with_progress()
        yield started


async def vcpo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "vcpo.cli.main", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )


async def test_top_prints_the_runs_of_a_namespace_as_the_status_has_them(operator):
    ran = await vcpo("top", "--namespace", NAMESPACE, "--json")
    assert ran.returncode == 0, ran.stderr
    (run,) = json.loads(ran.stdout)["runs"]
    status = (await operator.run())["status"]
    assert (run["place"], run["step"], run["steps"]) == ("default/demo", 5, 10)
    assert run["lag"] == {"p50": 1, "max": 2}
    assert (run["admission_lag_steps"], run["max_policy_lag_steps"]) == (4, 8)
    assert run["warning"]["score"] == status["warning"]["score"] == 0.75


async def test_events_have_the_throttle_with_its_reason(operator):
    ran = await vcpo("events", "demo", "--namespace", NAMESPACE, "--json")
    assert ran.returncode == 0, ran.stderr
    events = [json.loads(line) for line in ran.stdout.splitlines()]
    (throttled,) = [event for event in events if event["kind"] == "Throttled"]
    assert throttled["source"] == "operator"
    assert throttled["message"].endswith("the ESS ratio is 25.0% of the on-policy ratio.")


async def test_a_run_that_does_not_exist_is_answered_with_where_to_look(operator):
    ran = await vcpo("events", "dmeo", "--namespace", NAMESPACE)
    assert ran.returncode == 2
    assert "no VCPORun 'dmeo' in namespace default" in " ".join(ran.stderr.split())


async def test_what_changes_in_a_cluster_is_followed(operator):
    runs = ClusterRuns(Scope(namespace=NAMESPACE))
    await runs.start()
    try:
        assert [row.view.step for row in runs.rows(0.0)] == [5]
        operator.connections.report = report(step=6)
        await operator.settle_with_progress()
        async with asyncio.timeout(30.0):
            while [row.view.step for row in runs.rows(0.0)] != [6]:
                await asyncio.sleep(0.05)
    finally:
        await runs.close()


async def test_a_server_that_does_not_answer_is_named_in_one_line(tmp_path, monkeypatch):
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": ""}}],
        "current-context": "x",
    }
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(
        KubectlError, match=r"connection to the server 127\.0\.0\.1:1 was refused"
    ) as e:
        await ClusterRuns(Scope()).start()
    assert "\n" not in str(e.value)
