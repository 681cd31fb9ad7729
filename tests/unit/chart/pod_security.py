"""The `restricted` profile of the Pod Security Standards, as far as a chart can break it.

Source: https://kubernetes.io/docs/concepts/security/pod-security-standards
Stricter than the profile in one thing: root file systems must be read-only.
"""

from collections.abc import Iterator
from typing import Any

_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def violations(pod: dict[str, Any]) -> list[str]:
    """What in a pod's spec the profile forbids; empty when nothing."""
    return [*_of_pod(pod), *(each for c in _containers(pod) for each in _of_container(c, pod))]


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def _of_pod(pod: dict[str, Any]) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield field
    for volume in pod.get("volumes", ()):
        kinds = set(volume) - {"name"}
        if not kinds <= _VOLUMES:
            yield f"volume {volume['name']}: {kinds}"


def _of_container(container: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    both = {**pod.get("securityContext", {}), **own}
    if both.get("runAsNonRoot") is not True or both.get("runAsUser", 1) == 0:
        yield "may run as root"
    if both.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"}:
        yield "seccompProfile"
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if own.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "capabilities are not dropped"
    if set(own.get("capabilities", {}).get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities are added"
    if own.get("readOnlyRootFilesystem") is not True:
        yield "readOnlyRootFilesystem"
    if any("hostPort" in port for port in container.get("ports", ())):
        yield "hostPort"
