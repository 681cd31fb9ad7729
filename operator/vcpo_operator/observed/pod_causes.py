"""Causes: the one thing to put right first, out of all that Kubernetes says of a pod.

Pairs that the kubelet alternates between count as one cause (`ErrImagePull` is the attempt,
`ImagePullBackOff` the wait before the next), or the run's conditions would flicker with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from vcpo.service.crash import crash_cause
from vcpo_operator.observed.records import Cause, ContainerEnd

_WAITING: Final[Mapping[str, str]] = {
    "ErrImagePull": "ImagePullBackOff",
    "ImagePullBackOff": "ImagePullBackOff",
    "ErrImageNeverPull": "ImagePullBackOff",
    "InvalidImageName": "InvalidImageName",
    "CreateContainerConfigError": "CreateContainerConfigError",
    "CreateContainerError": "CreateContainerError",
    "RunContainerError": "RunContainerError",
    "CrashLoopBackOff": "CrashLoopBackOff",
}
_OUT_OF_MEMORY: Final = "OOMKilled"
_TELLING_WARNINGS: Final = frozenset(
    {
        "FailedAttachVolume",
        "FailedCreate",
        "FailedCreatePodSandBox",
        "FailedMapVolume",
        "FailedMount",
    }
)
"""Reasons of events that tell why a pod is not made, or not started on its node."""
_STEPS_BEYOND: Final = frozenset({"Pulling", "Pulled", "Created", "Started"})
"""Reasons of events of a kubelet that has the pod's volumes and its sandbox."""
_NOT_READY_REASONS: Final = frozenset(
    {"ContainersNotReady", "PodCompleted", "PodFailed", "ReadinessGatesNotReady"}
)
"""What a kubelet gives as the reason when it says that a pod is not ready."""
_CREDENTIALS = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_LONGEST_MESSAGE = 600
LONGEST_ENDING: Final = 2048
"""Characters of a container's last lines that are kept; kubelets keep as many bytes of a log."""


def pod_cause(pod: Mapping[str, Any]) -> Cause | None:
    """What keeps a pod from working; None when nothing is known to.

    pod: the object as the API server sends it.
    """
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
    return _scheduling_cause(name, status)


def lost_node_cause(pod: str, node: str | None) -> Cause:
    """The cause of a pod whose node does not answer."""
    message = (
        f"its node {node or 'unknown'} does not answer; another pod takes its place once the node"
        " is back or deleted"
    )
    return _cause("NodeLost", f"pod {pod}", message)


def _is_lost(status: Mapping[str, Any]) -> bool:
    """Whether the control plane speaks for a kubelet that is silent.

    It then takes the pod's condition `Ready` back, and cannot know of the containers: a kubelet
    that speaks never says that all containers are ready and the pod is not, unless a gate holds it.
    """
    if status.get("reason") == "NodeLost" or status.get("phase") == "Unknown":
        return True
    containers = status.get("containerStatuses") or ()
    if status.get("phase") != "Running" or not all(each.get("ready") for each in containers):
        return False
    taken_back = any(
        each["status"] == "False" and each.get("reason") not in _NOT_READY_REASONS
        for each in status.get("conditions") or ()
        if each["type"] == "Ready"
    )
    return bool(containers) and taken_back


def is_starting(pod: Mapping[str, Any]) -> bool:
    """Whether a pod has a node, where none of its containers has started yet."""
    status = pod.get("status") or {}
    states = [each.get("state") or {} for each in status.get("containerStatuses") or ()]
    on_its_way = status.get("phase", "Pending") == "Pending"
    begun = any("running" in state or "terminated" in state for state in states)
    return on_its_way and not begun and bool((pod.get("spec") or {}).get("nodeName"))


def container_end(pod: Mapping[str, Any], container: str) -> ContainerEnd | None:
    """How a container ended last; None when it has not ended yet.

    pod: the object as the API server sends it. container: name of one of its containers.
    """
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        state, last = status.get("state") or {}, status.get("lastState") or {}
        ended = state.get("terminated") or last.get("terminated")
        if status["name"] == container and ended:
            return ContainerEnd(
                pod=pod["metadata"]["name"],
                exit_code=int(ended.get("exitCode", 0)),
                reason=ended.get("reason") or "Unknown",
                message=redact_and_shorten((ended.get("message") or "").strip(), LONGEST_ENDING),
                time=ended.get("finishedAt") or "",
            )
    return None


def replica_failure(deployment: Mapping[str, Any]) -> Cause | None:
    """Why some pods of a Deployment cannot be made; None when all can.

    deployment: the object as the API server sends it.
    """
    for condition in (deployment.get("status") or {}).get("conditions") or ():
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            where = f"Deployment {deployment['metadata']['name']}"
            return _cause(condition["reason"], where, condition["message"])
    return None


def cause_from_events(events: Iterable[Mapping[str, Any]]) -> Cause | None:
    """What the newest telling Warning says; None when none does, or the pod has got beyond it.

    events: all about one object, as the API server sends them.
    """
    known = tuple(events)
    steps = (each for each in known if each.get("reason") in _STEPS_BEYOND)
    # Times are of whole seconds: within one, the step comes after what it has waited for.
    beyond = max(map(_last_seen, steps), default="")
    telling = [
        each
        for each in known
        if each.get("type") == "Warning" and each.get("reason") in _TELLING_WARNINGS
        if not beyond or _last_seen(each) > beyond
    ]
    if not telling:
        return None
    newest = max(telling, key=_last_seen)
    involved = newest["involvedObject"]
    kind = "pod" if involved["kind"] == "Pod" else involved["kind"]
    return _cause(newest["reason"], f"{kind} {involved['name']}", newest.get("message") or "")


def _last_seen(event: Mapping[str, Any]) -> str:
    """Time of an event, RFC 3339 in UTC: written in one of three places, by who wrote it."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max(str(each) for each in (*times, "") if each is not None)


def _container_cause(pod: str, status: Mapping[str, Any]) -> Cause | None:
    where = f"pod {pod}, container {status['name']}"
    state = status.get("state") or {}
    ended = state.get("terminated") or (status.get("lastState") or {}).get("terminated") or {}
    waiting = state.get("waiting") or {}
    works = bool(status.get("ready"))
    if ended.get("reason") == _OUT_OF_MEMORY and not works:
        return _cause(_OUT_OF_MEMORY, where, "ran out of memory; raise its memory limit")
    reason = _WAITING.get(waiting.get("reason", ""))
    if reason == "CrashLoopBackOff":
        return _cause(reason, where, _ending(ended))
    if reason is not None:
        return _cause(reason, where, waiting.get("message") or "the kubelet gives no message")
    if ended.get("exitCode") and not works:
        return _cause("ContainerEnded", where, _ending(ended))
    return None


def _ending(ended: Mapping[str, Any]) -> str:
    cause = crash_cause(ended.get("message") or "")
    return f"ended with exit code {ended.get('exitCode', 'unknown')}" + (
        f": {cause}" if cause else ""
    )


def _scheduling_cause(pod: str, status: Mapping[str, Any]) -> Cause | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = condition.get("reason") or "Unschedulable"
            return _cause(reason, f"pod {pod}", condition.get("message") or "cannot be scheduled")
    return None


def _cause(reason: str, where: str, message: str) -> Cause:
    return Cause(reason=reason, message=f"{where}: {redact_and_shorten(message, _LONGEST_MESSAGE)}")


def redact_and_shorten(message: str, longest: int) -> str:
    """A message fit for a status: no credentials of URLs, its end kept when it is too long."""
    clean = _CREDENTIALS.sub("***", message)
    return clean if len(clean) <= longest else "..." + clean[-(longest - 3) :]
