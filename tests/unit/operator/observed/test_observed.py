"""Objects of an API server, parsed into records."""

from typing import Any

import pytest

from vcpo_operator.children import Kind
from vcpo_operator.names import RunKey
from vcpo_operator.observed.index_view import index_child, run_key
from vcpo_operator.observed.parse import (
    collect_observed,
    parse_child,
    parse_group,
    parse_learner,
    parse_pod,
    parse_run_record,
)
from vcpo_operator.observed.pod_causes import (
    container_end,
    pod_cause,
    redact_and_shorten,
    replica_failure,
)
from vcpo_operator.observed.records import Cause


def body(**parts: Any) -> dict[str, Any]:
    metadata = {
        "name": "demo-rollout-main",
        "namespace": "ml",
        "uid": "u",
        "resourceVersion": "7",
        "labels": {"vcpo.dev/run": "demo", "vcpo.dev/role": "rollout", "vcpo.dev/group": "main"},
        **parts.pop("metadata", {}),
    }
    return {"metadata": metadata, "spec": {}, **parts}


def test_the_controlling_owner_is_the_owner():
    owners = [{"uid": "friend"}, {"uid": "boss", "controller": True}]
    assert parse_child(Kind.SERVICE, body(metadata={"ownerReferences": owners})).owner_uid == (
        "boss"
    )


def test_the_version_is_the_generation_where_there_is_one():
    assert parse_child(Kind.SERVICE, body()).version == 7
    assert parse_child(Kind.DEPLOYMENT, body(metadata={"generation": 3})).version == 3


def test_a_deployment_that_says_nothing_of_replicas_has_one():
    group = parse_group(body())
    assert (group.group, group.replicas, group.ready) == ("main", 1, 0)


def test_a_statefulset_settles_when_its_controller_has_seen_it():
    new = {"metadata": {"generation": 2}, "status": {"observedGeneration": 1}}
    assert not parse_learner(body(**new)).is_up_to_date
    assert parse_learner(body(**{**new, "status": {"observedGeneration": 2}})).is_up_to_date


LEAVING = {"metadata": {"deletionTimestamp": "1970-01-01T00:01:00Z"}}
COST = {"controller.kubernetes.io/pod-deletion-cost": "high"}
STATUSES = [{"name": "a", "restartCount": 2}, {"name": "b", "restartCount": 1}]


@pytest.mark.parametrize(
    ("parts", "field", "value"),
    [
        ({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}, "ready", True),
        ({}, "terminating", False),
        (LEAVING, "terminating", True),
        (LEAVING, "termination_deadline_s", 60.0),
        ({"status": {"containerStatuses": STATUSES}}, "restarts", 3),
        ({"metadata": {"annotations": COST}}, "deletion_cost", None),
    ],
)
def test_a_pod_is_read_with_the_restarts_of_all_containers_and_no_cost_that_is_no_number(
    parts: dict[str, Any], field: str, value: object
):
    assert getattr(parse_pod(body(**parts)), field) == value


def test_a_pod_of_an_unknown_role_is_not_ours():
    assert parse_pod(body(metadata={"labels": {"vcpo.dev/role": "judge"}})) is None


def test_the_order_of_arrival_does_not_matter():
    first = parse_child(Kind.SERVICE, body(metadata={"name": "a"}))
    second = parse_child(Kind.SERVICE, body(metadata={"name": "b"}))
    nothing = ([], [], [], [], [])
    assert collect_observed(*nothing, [first, second]) == collect_observed(
        *nothing, [second, first]
    )


def test_a_run_keeps_spec_and_status_as_they_are_stored():
    record = parse_run_record(body(spec={"steps": 3}, status={"step": 1}))
    assert (record.key, record.spec, record.status) == (
        RunKey("ml", "demo-rollout-main"),
        {"steps": 3},
        {"step": 1},
    )


def test_a_child_without_our_label_belongs_to_no_run():
    stranger = body(metadata={"labels": {}})
    assert run_key(stranger) is None
    assert index_child(Kind.SERVICE, stranger) == {}


def pod(*containers: dict[str, Any], **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "status": {"containerStatuses": list(containers), **status}}


TWO_PROBLEMS = "2 problems steps: missing"


def waiting_container(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"name": "c", "ready": False, "state": state}


def cause_of(body: dict[str, Any]) -> Cause:
    cause = pod_cause(body)
    assert cause is not None
    return cause


def test_a_pod_that_works_or_is_being_made_has_no_cause():
    assert pod_cause(pod({"name": "c", "ready": True, "state": {"running": {}}})) is None
    assert pod_cause(pod(waiting_container("ContainerCreating"))) is None


@pytest.mark.parametrize(
    ("reason", "folded"),
    [
        ("ErrImagePull", "ImagePullBackOff"),
        ("ImagePullBackOff", "ImagePullBackOff"),
        ("RunContainerError", "CrashLoopBackOff"),
    ],
)
def test_an_attempt_and_the_wait_for_the_next_one_are_one_cause(reason: str, folded: str):
    cause = cause_of(pod(waiting_container(reason, "no such file")))
    assert cause == Cause(reason=folded, message="pod p, container c: no such file")


LINE = '{"time": "2026-11-28T10:00:00.000Z", "level": "%s", "message": "%s"}\n'


@pytest.mark.parametrize(
    ("code", "tail", "told"),
    [
        (
            137,
            LINE % ("INFO", "StepSkipped"),
            "code 137: killed by SIGKILL: by its node, perhaps out",
        ),
        (137, 'd": 1}\n' + LINE % ("ERROR", "no room"), "by hand; its last error: no room"),
        (143, LINE % ("INFO", "step 3") * 2, "code 143: ended by SIGTERM"),
        (139, "2026-11-28 10:00:00,1 INFO a\nFatal: segfault\n", "exit code 139: Fatal: segfault"),
        (1, 'ep": 5}\n' + LINE % ("CRITICAL", "bad"), "ended with exit code 1: bad"),
    ],
)
def test_what_a_process_said_without_an_error_is_not_the_cause_of_its_end(code, tail, told):
    crashed = waiting_container("CrashLoopBackOff")
    crashed["lastState"] = {"terminated": {"exitCode": code, "message": tail}}
    cause = cause_of(pod(crashed))
    assert told in cause.message
    assert not {"StepSkipped", "step 3", "INFO", '"'} & set(cause.message.split())
    end = container_end(pod(crashed), "c")
    assert end is not None
    assert told.rpartition("code ")[2].removeprefix(f"{code}: ") in end.message
    assert "INFO" not in end.message


@pytest.mark.parametrize(
    ("last_lines", "told"),
    [
        ("spec.steps: missing\n", "spec.steps: missing"),
        ("2 problems\n  steps: missing\n", TWO_PROBLEMS),
    ],
)
def test_a_crash_shows_its_exit_code_and_cause(last_lines: str, told: str):
    crashed = waiting_container("CrashLoopBackOff", "back-off 10s")
    crashed["lastState"] = {"terminated": {"exitCode": 2, "message": last_lines}}
    cause = cause_of(pod(crashed))
    assert cause.message == f"pod p, container c: ended with exit code 2: {told}"


def test_out_of_memory_is_named_before_the_crash_loop_that_it_causes():
    crashed = waiting_container("CrashLoopBackOff")
    crashed["lastState"] = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    cause = cause_of(pod(crashed))
    assert cause.reason == "OOMKilled"


def test_a_container_that_recovered_has_no_cause():
    recovered = {
        "name": "c",
        "ready": True,
        "state": {"running": {}},
        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
    }
    assert pod_cause(pod(recovered)) is None


def test_a_pod_that_fits_nowhere_says_why():
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes have a GPU",
    }
    expected = Cause(reason="Unschedulable", message="pod p: 0/3 nodes have a GPU")
    assert pod_cause(pod(conditions=[condition])) == expected


def test_credentials_in_an_address_are_not_shown_and_of_a_long_message_the_end_is_kept():
    assert redact_and_shorten("pull https://me:secret@host/x", 99) == "pull https://***@host/x"
    assert redact_and_shorten("abcdefgh", 6) == "...fgh"


def running_pod(ready: str, reason: str = "", *, container_ready: bool = True) -> dict[str, Any]:
    container = {"name": "c", "ready": container_ready, "state": {"running": {}}}
    condition = {"type": "Ready", "status": ready, **({"reason": reason} if reason else {})}
    placed = {"spec": {"nodeName": "node-7"}}
    return {**pod(container, phase="Running", conditions=[condition]), **placed}


def test_a_pod_called_unready_while_its_containers_are_ready_has_lost_its_node():
    cause = cause_of(running_pod("False"))
    assert cause.reason == "NodeLost"
    assert cause.message.startswith("pod p: its node node-7 does not answer")


@pytest.mark.parametrize(
    "body",
    [
        running_pod("True"),
        running_pod("False", "ContainersNotReady", container_ready=False),
        running_pod("False", "ReadinessGatesNotReady"),
        pod(phase="Running"),
    ],
    ids=["ready", "container not ready", "gate", "no containers"],
)
def test_a_pod_of_which_its_kubelet_speaks_has_a_node(body: dict[str, Any]):
    assert pod_cause(body) is None


@pytest.mark.parametrize(
    "status", [{"phase": "Unknown"}, {"phase": "Running", "reason": "NodeLost"}]
)
def test_a_pod_that_is_said_to_be_lost_is_lost(status: dict[str, Any]):
    cause = cause_of({"metadata": {"name": "p"}, "status": status})
    assert cause.reason == "NodeLost"


def test_a_pod_that_its_node_put_out_says_why():
    put_out = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}
    expected = Cause(reason="Evicted", message="pod p: The node was low on memory.")
    assert pod_cause({"metadata": {"name": "p"}, "status": put_out}) == expected


def test_a_volume_that_the_pods_group_may_not_write_is_told_with_its_cure():
    denied = "PermissionError: [Errno 13] Permission denied: '/var/lib/vcpo/checkpoints'"
    ended = {"exitCode": 1, "message": denied}
    container = {
        "name": "learner",
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": ended},
    }
    body = {"metadata": {"name": "p"}, "status": {"containerStatuses": [container]}}
    cause = cause_of(body)
    assert "fsGroup" in cause.message
    assert "user and group 65532" in cause.message


def test_a_deployment_whose_pods_are_refused_says_why():
    failed = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate"}
    body = {"metadata": {"name": "d"}, "status": {"conditions": [{**failed, "message": "quota"}]}}
    assert replica_failure(body) == Cause(reason="FailedCreate", message="Deployment d: quota")
    assert replica_failure({"metadata": {"name": "d"}}) is None
