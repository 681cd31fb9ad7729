"""The command, arguments and environment of a pod's container."""

import pytest

from tests.fakes.kubelet.environment import (
    MissingReferenceError,
    Relocation,
    UnsupportedPodError,
    command_line,
    environment,
    expand,
    field_of,
    port_number,
)

POD = {
    "metadata": {
        "name": "demo-learner-0",
        "namespace": "team",
        "uid": "u-1",
        "labels": {"vcpo.dev/run": "demo"},
    },
    "status": {"podIP": "127.70.0.1"},
}


def find_nothing(plural, name, key):
    raise MissingReferenceError(name)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("/etc/vcpo/run.yaml", "/here/config/run.yaml"),
        ("--run-dir=/var/lib/vcpo", "--run-dir=/here/run"),
        ("/tmp", "/here/scratch"),
        ("/tmpfile", "/tmpfile"),
        ("/var/tmp/x", "/var/tmp/x"),
        ("a:/tmp:/etc/vcpo", "a:/here/scratch:/here/config"),
        ("/etc/vcpo-other", "/etc/vcpo-other"),
    ],
)
def test_only_whole_mount_paths_move(text, seen):
    mounts = {
        "/etc/vcpo": "/here/config",
        "/tmp": "/here/scratch",
        "/var/lib/vcpo": "/here/run",
    }
    assert Relocation(mounts, "127.70.0.1")(text) == seen


def test_a_mount_below_another_wins_over_it():
    mounts = {"/models": "/here/all", "/models/tiny": "/here/tiny"}
    assert Relocation(mounts, "127.70.0.1")("/models/tiny/config.json") == "/here/tiny/config.json"


def test_listening_everywhere_becomes_listening_on_the_pods_address():
    relocate = Relocation({}, "127.70.0.1")
    assert relocate("--listen=0.0.0.0:7600") == "--listen=127.70.0.1:7600"


@pytest.mark.parametrize("text", ["10.0.0.0:80", "0.0.0.0", "version 0.0.0.0.1:2"])
def test_what_only_resembles_listening_everywhere_stays(text):
    assert Relocation({}, "127.70.0.1")(text) == text


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("--worker-id=$(POD_NAME)", "--worker-id=demo-0"),
        ("$$(POD_NAME)", "$(POD_NAME)"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$POD_NAME", "$POD_NAME"),
    ],
)
def test_references_to_variables_are_expanded_as_kubernetes_does(text, seen):
    assert expand(text, {"POD_NAME": "demo-0"}) == seen


def test_a_variable_sees_only_those_before_it():
    container = {"env": [{"name": "B", "value": "$(A)"}, {"name": "A", "value": "1"}]}
    assert environment(container, POD, find_nothing) == {"B": "$(A)", "A": "1"}


def test_a_variable_may_be_a_field_of_the_pod():
    source = {"fieldRef": {"fieldPath": "metadata.name"}}
    container = {"env": [{"name": "POD_NAME", "valueFrom": source}]}
    assert environment(container, POD, find_nothing) == {"POD_NAME": "demo-learner-0"}


def test_a_variable_may_be_a_key_of_a_secret():
    source = {"secretKeyRef": {"name": "shared", "key": "token"}}
    container = {"env": [{"name": "VCPO_WORKER_KEY", "valueFrom": source}]}
    assert environment(container, POD, lambda *place: "/".join(place)) == {
        "VCPO_WORKER_KEY": "secrets/shared/token"
    }


def test_an_unknown_source_of_a_variable_is_refused_by_name():
    container = {"env": [{"name": "CPU", "valueFrom": {"resourceFieldRef": {}}}]}
    with pytest.raises(UnsupportedPodError, match=r"env\[CPU\].valueFrom: resourceFieldRef"):
        environment(container, POD, find_nothing)


def test_one_label_of_the_pod_is_a_field():
    assert field_of(POD, "metadata.labels['vcpo.dev/run']") == "demo"


def test_arguments_follow_the_command():
    container = {"command": ["python", "-c"], "args": ["print($(N))"]}
    assert command_line(container, {"N": "1"}) == ["python", "-c", "print(1)"]


def test_a_container_without_a_command_is_refused():
    with pytest.raises(UnsupportedPodError, match="containers"):
        command_line({"args": ["x"]}, {})


def test_a_port_may_be_given_by_its_name():
    container = {"name": "learner", "ports": [{"name": "grpc", "containerPort": 7600}]}
    assert port_number(container, "grpc") == 7600
