"""Status of a pod and its containers, in the API's words, from what the fake kubelet knows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]

_KILLED = 137
_MAX_MESSAGE_BYTES = 2048
BACK_OFF_RESTARTING = "CrashLoopBackOff"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerState:
    """One container at one moment. Times as the API writes them."""

    name: str
    image: str
    waiting: tuple[str, str] | None = ("ContainerCreating", "")
    """(reason, message) while it does not run."""
    running_since: str | None = None
    terminated: JsonObject | None = None
    """How it ended for good."""
    last_terminated: JsonObject | None = None
    """How its run before this one ended."""
    restarts: int = 0
    started: bool = False
    """Whether its start-up probe has passed."""
    ready: bool = False

    def status(self) -> JsonObject:
        """The entry of `status.containerStatuses`."""
        last = {} if self.last_terminated is None else {"terminated": self.last_terminated}
        return {
            "name": self.name,
            "image": self.image,
            "imageID": "" if self._waits_for_image else f"fake://{self.image}",
            "containerID": "" if self._waits_for_image else f"fake://{self.name}/{self.restarts}",
            "restartCount": self.restarts,
            "started": self.started,
            "ready": self.ready,
            "state": self._state(),
            "lastState": last,
        }

    @property
    def _waits_for_image(self) -> bool:
        return self.waiting is not None and self.restarts == 0

    def _state(self) -> JsonObject:
        if self.terminated is not None:
            return {"terminated": self.terminated}
        if self.running_since is not None:
            return {"running": {"startedAt": self.running_since}}
        reason, message = self.waiting or ("ContainerCreating", "")
        return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


def termination(
    exit_code: int, *, killed_by_us: bool, started_at: str, finished_at: str, tail: str
) -> JsonObject:
    """How a process ended.

    exit_code: negative is the number of a signal, as `subprocess` has it.
    killed_by_us: SIGKILL from anybody else is taken for the kernel's, that is for lack of memory.
    tail: end of its output; kept when it failed, as `FallbackToLogsOnError` does.
    """
    code = 128 - exit_code if exit_code < 0 else exit_code
    out_of_memory = code == _KILLED and exit_code < 0 and not killed_by_us
    reason = "OOMKilled" if out_of_memory else "Error" if code else "Completed"
    ended: JsonObject = {
        "exitCode": code,
        "reason": reason,
        "startedAt": started_at,
        "finishedAt": finished_at,
    }
    if exit_code < 0:
        ended["signal"] = -exit_code
    if code and tail:
        ended["message"] = tail.encode()[-_MAX_MESSAGE_BYTES:].decode(errors="ignore")
    return ended


def phase(states: Sequence[ContainerState]) -> str:
    """Phase of a pod: Pending until all containers have been started once."""
    if all(state.terminated is not None for state in states):
        failed = any(state.terminated["exitCode"] for state in states if state.terminated)
        return "Failed" if failed else "Succeeded"
    started = all(state.running_since or state.terminated or state.restarts for state in states)
    return "Running" if started else "Pending"


def conditions(states: Sequence[ContainerState], before: Sequence[JsonObject], now: str) -> Any:
    """Conditions of a pod that is bound to a node; a time changes only with its status."""
    ready = all(state.ready for state in states)
    unready = [state.name for state in states if not state.ready]
    values = {"PodScheduled": True, "Initialized": True, "ContainersReady": ready, "Ready": ready}
    earlier = {condition["type"]: condition for condition in before}
    result = []
    for kind, holds in values.items():
        status = "True" if holds else "False"
        known = earlier.get(kind, {})
        since = known.get("lastTransitionTime", now) if known.get("status") == status else now
        condition = {"type": kind, "status": status, "lastTransitionTime": since}
        if not holds:
            condition["reason"] = "ContainersNotReady"
            condition["message"] = f"containers with unready status: {unready}"
        result.append(condition)
    return result


def pod_status(
    states: Sequence[ContainerState], before: JsonObject, *, pod_ip: str, now: str
) -> JsonObject:
    """The whole status of a pod that is bound to this node. before: its last one."""
    return {
        "phase": phase(states),
        "podIP": pod_ip,
        "podIPs": [{"ip": pod_ip}],
        "hostIP": "127.0.0.1",
        "startTime": before.get("startTime") or now,
        "conditions": conditions(states, before.get("conditions") or (), now),
        "containerStatuses": [state.status() for state in states],
    }


def restart_delay_s(restarts: int, *, first_s: float, last_s: float) -> float:
    """Wait before a restart, in seconds: none, then first_s, doubling up to last_s.

    restarts: how many there were already.
    """
    return 0.0 if restarts == 0 else min(last_s, first_s * 2.0 ** (restarts - 1))
