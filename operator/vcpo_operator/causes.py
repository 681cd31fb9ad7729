"""Causes: the one thing to put right first, out of all that a pod's status says.

Pairs that the kubelet alternates between count as one cause (`ErrImagePull` is the attempt,
`ImagePullBackOff` the wait before the next), or the run's conditions would flicker with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from vcpo_operator.records import Cause

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
_CREDENTIALS = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_LONGEST_MESSAGE = 600


def pod_cause(pod: Mapping[str, Any]) -> Cause | None:
    """What keeps a pod from working; None when nothing is known to.

    pod: the object as the API server sends it.
    """
    name = pod["metadata"]["name"]
    status = pod.get("status") or {}
    statuses = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    for container in statuses:
        cause = _container_cause(name, container)
        if cause is not None:
            return cause
    return _scheduling_cause(name, status)


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
    tail = (ended.get("message") or "").strip()
    return f"ended with exit code {ended.get('exitCode', 'unknown')}" + (
        f": {tail}" if tail else ""
    )


def _scheduling_cause(pod: str, status: Mapping[str, Any]) -> Cause | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = condition.get("reason") or "Unschedulable"
            return _cause(reason, f"pod {pod}", condition.get("message") or "cannot be scheduled")
    return None


def _cause(reason: str, where: str, message: str) -> Cause:
    return Cause(reason=reason, message=f"{where}: {presentable(message, _LONGEST_MESSAGE)}")


def presentable(message: str, longest: int) -> str:
    """A message fit for a status: no credentials of URLs, its end kept when it is too long."""
    clean = _CREDENTIALS.sub("***", message)
    return clean if len(clean) <= longest else "..." + clean[-(longest - 3) :]
