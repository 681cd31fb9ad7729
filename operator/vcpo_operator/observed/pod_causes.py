"""The cause to fix first, out of all that Kubernetes reports about a pod. Pure.

Reasons between which the kubelet alternates count as one cause. `ErrImagePull` is an attempt and
`ImagePullBackOff` the wait before the next one; without this the run's conditions would flicker.

Processes write why they end into the file that the kubelet reports. One that was killed could not,
and the kubelet reports the end of its log: of that, only errors are a cause.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from vcpo_operator.observed.records import Cause
from vcpo_operator.observed.status import MAX_LOG_TAIL_CHARACTERS, ContainerEnd, from_rfc3339

_WAITING: Final[Mapping[str, str]] = {
    **dict.fromkeys(("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull"), "ImagePullBackOff"),
    **dict.fromkeys(("RunContainerError", "CrashLoopBackOff"), "CrashLoopBackOff"),
    "InvalidImageName": "InvalidImageName",
    "CreateContainerConfigError": "CreateContainerConfigError",
    "CreateContainerError": "CreateContainerError",
}
_UNWRITABLE: Final = re.compile(r"Permission denied: '/var/(lib|cache)/vcpo")
"""What a process says that may not write its volume."""
_UNWRITABLE_FIX: Final = (
    "The volume's driver does not give it to the pods' group (fsGroup), as many shared file systems"
    " do not: let the volume's folder belong to user and group 65532"
)
DISRUPTIONS: Final = frozenset(
    {
        *("DeletionByPodGC", "DeletionByTaintManager", "EvictionByEvictionAPI"),
        *("PreemptionByScheduler", "TerminationByKubelet"),
    }
)
"""Reasons of the condition `DisruptionTarget`: somebody needs the node, and nothing is wrong."""
_OUT_OF_MEMORY: Final = "OOMKilled"
_NOT_READY_REASONS: Final = frozenset(
    {"ContainersNotReady", "PodCompleted", "PodFailed", "ReadinessGatesNotReady"}
)
"""Reasons that a kubelet gives when it reports that a pod is not ready."""
_KILLED: Final[Mapping[Any, str]] = {
    137: "killed by SIGKILL: by its node, perhaps out of memory, or by hand",
    143: "ended by SIGTERM",
}
_ERRORS: Final = {"ERROR", "CRITICAL"}
_HARMLESS: Final = re.compile(r"\d{4}-\d\d-\d\d \S+ (DEBUG|INFO|WARNING) ")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_MAX_MESSAGE_CHARACTERS = 600


def pod_cause(pod: Mapping[str, Any]) -> Cause | None:
    """Return what keeps a pod from working; None when no cause is known."""
    return _pod_cause(pod) or _disruption(pod)


def _pod_cause(pod: Mapping[str, Any]) -> Cause | None:
    name = pod["metadata"]["name"]
    status = pod.get("status") or {}
    if _is_lost(status):
        return lost_node_cause(name, (pod.get("spec") or {}).get("nodeName"))
    if status.get("phase") == "Failed" and status.get("reason"):
        message = status.get("message") or "the kubelet gives no message"
        return _cause(status["reason"], f"pod {name}", message)
    statuses = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    for container in statuses:
        cause = _container_cause(name, container)
        if cause is not None:
            return cause
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = condition.get("reason") or "Unschedulable"
            return _cause(reason, f"pod {name}", condition.get("message") or "cannot be scheduled")
    return None


def _disruption(pod: Mapping[str, Any]) -> Cause | None:
    """Return who takes a pod from its node: an eviction, the scheduler, a taint, the kubelet."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason = condition.get("reason") or "Disrupted"
            message = condition.get("message") or "it leaves its node"
            return _cause(reason, f"pod {pod['metadata']['name']}", message)
    return None


def lost_node_cause(pod: str, node: str | None) -> Cause:
    """Return the cause of a pod whose node does not answer."""
    message = (
        f"its node {node or 'unknown'} does not answer; another pod replaces it when the node is"
        " back or deleted"
    )
    return _cause("NodeLost", f"pod {pod}", message)


def _is_lost(status: Mapping[str, Any]) -> bool:
    """Whether the control plane reports in place of a silent kubelet.

    The control plane then sets the pod's condition `Ready` to False and leaves the containers as
    they were. A kubelet itself never reports that all containers are ready and the pod is not,
    unless a readiness gate holds the pod.
    """
    if status.get("reason") == "NodeLost" or status.get("phase") == "Unknown":
        return True
    containers = status.get("containerStatuses") or ()
    if status.get("phase") != "Running" or not all(each.get("ready") for each in containers):
        return False
    is_revoked = any(
        each["status"] == "False" and each.get("reason") not in _NOT_READY_REASONS
        for each in status.get("conditions") or ()
        if each["type"] == "Ready"
    )
    return bool(containers) and is_revoked


def container_end(pod: Mapping[str, Any], container: str) -> ContainerEnd | None:
    """Return how a container ended last; None when it has not ended yet."""
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        state, last = status.get("state") or {}, status.get("lastState") or {}
        ended = state.get("terminated") or last.get("terminated")
        if status["name"] == container and ended:
            return ContainerEnd(
                pod=pod["metadata"]["name"],
                exit_code=int(ended.get("exitCode", 0)),
                reason=ended.get("reason") or "Unknown",
                message=redact_and_shorten(_told(ended), MAX_LOG_TAIL_CHARACTERS),
                end_s=from_rfc3339(ended.get("finishedAt")),
            )
    return None


def replica_failure(deployment: Mapping[str, Any]) -> Cause | None:
    """Return why some pods of a Deployment cannot be created; None when all can."""
    for condition in (deployment.get("status") or {}).get("conditions") or ():
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            where = f"Deployment {deployment['metadata']['name']}"
            return _cause(condition["reason"], where, condition["message"])
    return None


def _container_cause(pod: str, status: Mapping[str, Any]) -> Cause | None:
    where = f"pod {pod}, container {status['name']}"
    state = status.get("state") or {}
    ended = state.get("terminated") or (status.get("lastState") or {}).get("terminated") or {}
    waiting = state.get("waiting") or {}
    is_ready = bool(status.get("ready"))
    if ended.get("reason") == _OUT_OF_MEMORY and not is_ready:
        return _cause(_OUT_OF_MEMORY, where, "ran out of memory; raise its memory limit")
    reason = _WAITING.get(waiting.get("reason", ""))
    if reason == "CrashLoopBackOff" and ended:
        return _cause(reason, where, _exit_message(ended))
    if reason is not None:
        return _cause(reason, where, waiting.get("message") or "the kubelet gives no message")
    if ended.get("exitCode") and not is_ready:
        return _cause("ContainerEnded", where, _exit_message(ended))
    return None


def _exit_message(ended: Mapping[str, Any]) -> str:
    code, cause = ended.get("exitCode", "unknown"), " ".join(_told(ended).split())
    if _UNWRITABLE.search(cause):
        cause = f"{cause.rstrip('.')}. {_UNWRITABLE_FIX}"
    return f"ended with exit code {code}: {cause}" if cause else f"ended with exit code {code}"


def _told(ended: Mapping[str, Any]) -> str:
    """Return who killed a container, and what it said of its end: no log lines below ERROR."""
    killed, lines = _KILLED.get(ended.get("exitCode")), (ended.get("message") or "").splitlines()
    records = [_record(line) for line in lines]
    if records[1:] and records[1] is not None and lines[0].endswith("}"):
        lines[0] = "" if records[0] is None else lines[0]  # the end of a line that was cut
    told = [
        str(record.get("message", "")) if record is not None else line
        for line, record in zip(lines, records, strict=True)
        if (not _HARMLESS.match(line) if record is None else record.get("level") in _ERRORS)
    ]
    text = "\n".join(filter(str.strip, told))
    return f"{killed}; its last error: {text}" if killed and text else killed or text


def _record(line: str) -> Mapping[str, Any] | None:
    """Return a log line of JSON; None if it is none."""
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        return record if isinstance(record, dict) else None
    return None


def _cause(reason: str, where: str, message: str) -> Cause:
    return Cause(
        reason=reason, message=f"{where}: {redact_and_shorten(message, _MAX_MESSAGE_CHARACTERS)}"
    )


def redact_and_shorten(message: str, longest: int) -> str:
    """Return a message without credentials in URLs, shortened to its last `longest` characters."""
    clean = _CREDENTIALS.sub("***", message)
    return clean if len(clean) <= longest else "..." + clean[-(longest - 3) :]
