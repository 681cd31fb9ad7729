"""Logs and events of a run in a cluster, through kubectl."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime

from vcpo.monitor.cluster_runs import find_run, has_ended, run_events
from vcpo.monitor.kubectl import KubectlError, Scope, kubectl_lines, kubectl_output
from vcpo.monitor.log_lines import LogLine
from vcpo.records.journal import EventRecord
from vcpo.service.log_line import plain_text

RUN_LABEL = "vcpo.dev/run"
ROLE_LABEL = "vcpo.dev/role"
GROUP_LABEL = "vcpo.dev/group"
"""Labels of a run's pods, as the operator sets them."""

_ROLES = {"learner", "rollout"}
_MAX_PODS = 512


def log_arguments(
    scope: Scope, name: str, part: str | None, *, tail: int | None, follow: bool
) -> list[str]:
    """Return kubectl's arguments for the logs of a run.

    part: `learner`, `rollout`, or a rollout group; None is all pods.
    """
    labels = [f"{RUN_LABEL}={name}"]
    if part is not None:
        labels.append(f"{ROLE_LABEL if part in _ROLES else GROUP_LABEL}={part}")
    arguments = ["logs", *scope.arguments(), f"--selector={','.join(labels)}", "--prefix"]
    arguments += [f"--tail={-1 if tail is None else tail}", f"--max-log-requests={_MAX_PODS}"]
    return [*arguments, *(["--follow"] if follow else [])]


def cluster_logs(
    scope: Scope, name: str, part: str | None, *, tail: int | None, follow: bool
) -> Iterator[LogLine]:
    """Yield the lines of a run's pods; JSON lines as text.

    Raises: KubectlError.
    """
    for line in kubectl_lines(log_arguments(scope, name, part, tail=tail, follow=follow)):
        # With --prefix, kubectl writes `[pod/NAME/CONTAINER] text`.
        prefix, bracket, text = line.partition("] ")
        pod = prefix.removeprefix("[pod/").partition("/")[0] if bracket else ""
        for shown in plain_text(text if bracket else line).split("\n"):
            yield LogLine(process=pod, text=shown)


def logged_events(lines: Iterable[str]) -> list[EventRecord]:
    """Return the learner's events among the lines of its log; each has the field `event`."""
    events = []
    for line in lines:
        try:
            entry = json.loads(line) if line.startswith("{") else {}
        except json.JSONDecodeError:  # the kubelet cut it
            continue
        if kind := entry.get("event"):
            message = str(entry.get("message", "")).removeprefix(f"{kind}: ")
            time_s = datetime.fromisoformat(entry["time"]).timestamp()
            events.append(
                EventRecord(time_unix_s=time_s, source="learner", kind=kind, message=message)
            )
    return events


class ClusterEvents:
    """The events of a run in a cluster, the operator's and the learner's; see `EventSource`."""

    def __init__(self, scope: Scope, name: str) -> None:
        self._scope = scope
        self._name = name
        self._seen: set[tuple[float, str, str]] = set()

    def read(self) -> list[EventRecord]:
        """Return the events since the last call; at the first call all that are kept.

        Raises: KubectlError.
        """
        log = log_arguments(self._scope, self._name, "learner", tail=None, follow=False)
        try:
            # Without --prefix: the lines must be those of the learner.
            lines = kubectl_output([each for each in log if each != "--prefix"]).splitlines()
        except KubectlError:  # its pod does not exist, or has not started
            lines = []
        events = [*run_events(self._scope, self._name), *logged_events(lines)]
        new = [event for event in events if _identity(event) not in self._seen]
        self._seen.update(map(_identity, new))
        return new

    def has_ended(self) -> bool:
        """Return whether the run is complete, has failed, or is deleted.

        Raises: KubectlError.
        """
        run = find_run(self._scope, self._name)
        return run is None or has_ended(run)


def _identity(event: EventRecord) -> tuple[float, str, str]:
    return event.time_unix_s, event.kind, event.message
