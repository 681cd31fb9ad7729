"""Pods run by the fake kubelet, as small processes."""

import asyncio
import os
import select
import signal
import sys
from pathlib import Path

import pytest

from tests.fakes.kubelet.client import KubeClient
from tests.fakes.kubelet.settings import ApiAccess
from tests.fakes.kubernetes.api_server import FakeApiServer
from tests.fixtures.kubernetes.kubelet import PATIENCE_S, PODS, node_fixture, pod_body, until_stored

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the fake kubelet needs Linux's loopback network"
)
ROOT = Path(__file__).resolve().parents[3]

SLEEP = ("python", "-c", "import time; time.sleep(600)")
IGNORE_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""
LEAVE_A_NOTE = """
import pathlib, signal, sys, time
def leave(*_):
    print("saving", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
pathlib.Path("up").touch()
time.sleep(600)
"""
IS_UP = {"exec": {"command": ["test", "-e", "up"]}, "periodSeconds": 1}


@pytest.fixture
async def node(tmp_path):
    async with node_fixture(tmp_path) as running:
        yield running


def is_gone(node, name):
    return lambda: node.server.api.store.get(PODS, "default", name) is None


def is_running(node, name):
    return lambda: "running" in node.container(name).get("state", {})


def is_ready(node, name):
    return lambda: node.container(name).get("ready")


def waits_for(node, name, reason):
    return lambda: node.container(name).get("state", {}).get("waiting", {}).get("reason") == reason


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_pod_runs_to_its_end(node):
    await node.pod("job", "python", "-c", "print(40 + 2)", restartPolicy="Never")
    await node.until(lambda: node.status("job").get("phase") == "Succeeded")
    assert node.log("job") == "42\n"


async def test_a_failure_keeps_its_exit_code_and_last_words(node):
    program = "raise SystemExit('no such model')"
    await node.pod("job", "python", "-c", program, restartPolicy="Never")
    await node.until(lambda: node.status("job").get("phase") == "Failed")
    ended = node.container("job")["state"]["terminated"]
    assert (ended["exitCode"], ended["message"]) == (1, "no such model")


async def test_a_pod_has_an_address_of_its_own(node):
    await node.pod("one", *SLEEP)
    await node.pod("two", *SLEEP)
    await node.until(lambda: node.status("one").get("podIP") and node.status("two").get("podIP"))
    assert node.status("one")["podIP"] != node.status("two")["podIP"]


async def test_environment_and_arguments_are_the_pods(node):
    source = {"fieldRef": {"fieldPath": "metadata.name"}}
    await node.pod(
        "job",
        *("python", "-c", "import sys; print(sys.argv[1])", "I am $(POD_NAME)"),
        env=[{"name": "POD_NAME", "valueFrom": source}],
        restartPolicy="Never",
    )
    await node.until(lambda: node.status("job").get("phase") == "Succeeded")
    assert node.log("job") == "I am job\n"


async def test_nothing_of_this_machines_environment_reaches_a_pod(node, monkeypatch):
    monkeypatch.setenv("OF_THIS_MACHINE", "1")
    program = "import os; print('OF_THIS_MACHINE' in os.environ)"
    await node.pod("job", "python", "-c", program, restartPolicy="Never")
    await node.until(lambda: node.status("job").get("phase") == "Succeeded")
    assert node.log("job") == "False\n"


async def test_a_pod_waits_for_its_config_map(node):
    await node.pod(
        "job",
        *("python", "-c", "print(open('/etc/job/greeting').read())"),
        volumeMounts=[{"name": "config", "mountPath": "/etc/job"}],
        volumes=[{"name": "config", "configMap": {"name": "greetings"}}],
        restartPolicy="Never",
    )
    await node.until(waits_for(node, "job", "ContainerCreating"))
    await node.until(lambda: node.server.api.store.objects(("", "events"), "default"))
    (event,) = node.server.api.store.objects(("", "events"), "default")
    assert (event["type"], event["reason"]) == ("Warning", "FailedMount")
    assert event["message"].endswith('configmap "greetings" not found')
    config = {"metadata": {"name": "greetings"}, "data": {"greeting": "hello"}}
    await node.client.create("/api/v1/namespaces/default/configmaps", config)
    await node.until(lambda: node.status("job").get("phase") == "Succeeded")
    assert node.log("job") == "hello\n"


async def test_a_variable_whose_secret_is_missing_is_said_in_the_status(node):
    source = {"secretKeyRef": {"name": "token", "key": "token"}}
    await node.pod("job", "true", env=[{"name": "TOKEN", "valueFrom": source}])
    await node.until(waits_for(node, "job", "CreateContainerConfigError"))
    waiting = node.container("job")["state"]["waiting"]
    assert waiting["message"] == 'secret "token" not found'


async def test_a_pod_is_ready_once_its_probe_passes(node):
    await node.pod("service", "python", "-c", LEAVE_A_NOTE, readinessProbe=IS_UP)
    await node.until(is_ready(node, "service"))
    conditions = {each["type"]: each["status"] for each in node.status("service")["conditions"]}
    assert conditions["Ready"] == "True"


async def test_readiness_waits_for_the_startup_probe(node):
    never = {"exec": {"command": ["false"]}, "failureThreshold": 1000}
    always = {"exec": {"command": ["true"]}}
    await node.pod("service", *SLEEP, startupProbe=never, readinessProbe=always)
    await node.until(is_running(node, "service"))
    assert not node.container("service")["started"]
    assert not node.container("service")["ready"]


async def test_a_container_that_fails_its_liveness_probe_is_started_again(node):
    sick = {"exec": {"command": ["false"]}, "failureThreshold": 1}
    await node.pod("service", *SLEEP, livenessProbe=sick)
    await node.until(lambda: node.container("service").get("restartCount", 0) >= 1)
    assert node.container("service")["lastState"]["terminated"]["exitCode"] == 143


async def test_a_container_that_keeps_failing_backs_off(node):
    await node.pod("service", "false")
    await node.until(waits_for(node, "service", "CrashLoopBackOff"))
    await node.until(lambda: node.container("service").get("restartCount", 0) >= 2)
    assert node.container("service")["lastState"]["terminated"]["reason"] == "Error"


async def test_a_container_killed_from_outside_ran_out_of_memory(node):
    await node.pod("service", *SLEEP)
    await node.until(is_running(node, "service"))
    os.kill(node.kubelet.pids[0], signal.SIGKILL)
    await node.until(lambda: node.container("service")["lastState"])
    assert node.container("service")["lastState"]["terminated"]["reason"] == "OOMKilled"


async def test_an_image_that_nobody_has_is_not_pulled(node):
    await node.pod("service", *SLEEP, image="registry.example/learner:unpullable")
    await node.until(waits_for(node, "service", "ImagePullBackOff"))
    assert node.kubelet.pids == []


async def test_a_pod_for_another_kind_of_node_stays_unscheduled(node):
    await node.pod("service", *SLEEP, nodeSelector={"gpu": "h200"})
    await node.until(lambda: node.status("service").get("conditions"))
    (condition,) = node.status("service")["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "Unschedulable")


async def test_what_the_fake_kubelet_cannot_do_is_said_in_the_status(node):
    await node.pod("service", *SLEEP, envFrom=[{"configMapRef": {"name": "x"}}])
    await node.until(waits_for(node, "service", "CreateContainerConfigError"))
    assert "envFrom" in node.container("service")["state"]["waiting"]["message"]


async def test_a_deleted_pod_is_asked_to_leave_and_then_forgotten(node):
    await node.pod("service", "python", "-c", LEAVE_A_NOTE, readinessProbe=IS_UP)
    await node.until(is_ready(node, "service"))
    await node.client.delete("/api/v1/namespaces/default/pods/service")
    await node.until(is_gone(node, "service"))
    assert node.log("service") == "saving\n"


async def test_a_pod_that_does_not_leave_is_killed_after_its_grace_period(node):
    says_deaf = {"exec": {"command": ["grep", "-rqs", "deaf", str(node.root / "logs")]}}
    await node.pod(
        "service",
        *("python", "-c", IGNORE_SIGTERM),
        readinessProbe=says_deaf,
        terminationGracePeriodSeconds=1,
    )
    await node.until(is_ready(node, "service"))
    await node.client.delete("/api/v1/namespaces/default/pods/service")
    await node.until(is_gone(node, "service"))
    assert node.kubelet.pids == []


async def test_no_process_is_left_when_the_fake_kubelet_is(tmp_path):
    async with node_fixture(tmp_path) as node:
        await node.pod("service", "python", "-c", IGNORE_SIGTERM)
        await node.until(is_running(node, "service"))
        (pid,) = node.kubelet.pids
    assert not is_alive(pid)


async def test_no_process_outlives_a_fake_kubelet_that_was_killed(tmp_path):
    tells_pid = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid()))"
    has_told = {"exec": {"command": ["test", "-s", "pid"]}, "periodSeconds": 1}
    async with FakeApiServer() as server, KubeClient(ApiAccess(url=server.url)) as client:
        command = [sys.executable, "-m", "tests.fakes.kubelet.kubelet"]
        kubelet = await asyncio.create_subprocess_exec(
            *command, f"--server={server.url}", f"--root={tmp_path}", cwd=ROOT
        )
        program = f"{tells_pid}; time.sleep(600)"
        body = pod_body("service", "python", "-c", program, readinessProbe=has_told)
        await client.create("/api/v1/namespaces/default/pods", body)
        await until_stored(server, lambda: is_said_ready(server, "service"))
        (told,) = tmp_path.rglob("pid")
        watched = os.pidfd_open(int(told.read_text()))
        kubelet.kill()
        await kubelet.wait()
        ended, _, _ = await asyncio.to_thread(select.select, [watched], [], [], PATIENCE_S)
        os.close(watched)
        assert ended == [watched]


def is_said_ready(server, name):
    body = server.api.store.get(PODS, "default", name)
    statuses = body["status"].get("containerStatuses") or [{}]
    return statuses[0].get("ready")
