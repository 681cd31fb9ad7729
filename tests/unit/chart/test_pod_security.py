"""Every pod of the chart passes the restricted profile of the Pod Security Standards."""

from __future__ import annotations

import copy

import pytest

from tests.fixtures.chart.rendering import of_kind, operator_pod
from tests.fixtures.chart.variants import all_variants
from tests.unit.chart.pod_security import violations

VARIANTS = all_variants()

BREACHES = {
    "root": ("securityContext", {"runAsUser": 0}, "may run as root"),
    "unconfined": ("securityContext", {"seccompProfile": {"type": "Unconfined"}}, "seccompProfile"),
    "escalation": (
        "securityContext",
        {"allowPrivilegeEscalation": True},
        "allowPrivilegeEscalation",
    ),
    "kept capabilities": ("securityContext", {"capabilities": {}}, "capabilities are not dropped"),
    "writable root": (
        "securityContext",
        {"readOnlyRootFilesystem": False},
        "readOnlyRootFilesystem",
    ),
    "host port": ("ports", [{"containerPort": 1, "hostPort": 1}], "hostPort"),
}


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_pod_passes_the_restricted_profile(values):
    pods = [operator_pod(values), *(pod["spec"] for pod in of_kind("Pod", values))]
    assert [violations(pod) for pod in pods] == [[] for _ in pods]


@pytest.mark.parametrize(("field", "change", "breach"), BREACHES.values(), ids=BREACHES.keys())
def test_the_check_sees_a_breach(field, change, breach):
    pod = copy.deepcopy(operator_pod())
    container = pod["containers"][0]
    container[field] = {**container[field], **change} if isinstance(change, dict) else change
    assert breach in violations(pod)


def test_the_check_sees_the_host_through_a_volume():
    pod = {**operator_pod(), "volumes": [{"name": "root", "hostPath": {"path": "/"}}]}
    assert violations(pod) == ["volume root: {'hostPath'}"]


def test_only_the_operators_pod_holds_a_token_of_the_api_server():
    assert operator_pod()["automountServiceAccountToken"] is True
    assert of_kind("Pod")[0]["spec"]["automountServiceAccountToken"] is False
    assert of_kind("ServiceAccount")[0]["automountServiceAccountToken"] is False


def test_every_container_says_what_it_needs():
    containers = [operator_pod()["containers"][0], of_kind("Pod")[0]["spec"]["containers"][0]]
    for container in containers:
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
