"""Events: what `kubectl describe` shows of a run's turns. Pure.

One event per condition that changed its status or reason, for the conditions that people follow.
The status is the interface; an event that is lost loses nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final

from vcpo.spec import API_VERSION, KIND
from vcpo_operator.names import FIELD_MANAGER
from vcpo_operator.records import RunRecord
from vcpo_operator.run_status import RunStatus, StatusCondition, rfc3339

_FOLLOWED: Final = (
    "Accepted",
    "LearnerReady",
    "RolloutsReady",
    "EssHealthy",
    "LearnerFed",
    "Suspended",
    "Ready",
    "Complete",
    "Failed",
)
_BAD_WHEN_FALSE: Final = {"Accepted", "LearnerReady", "RolloutsReady", "EssHealthy"}
_NORMAL_REASONS: Final = {"PodPending", "BelowMinimum", "Suspended", "Ended"}


def transitions(
    record: RunRecord, before: RunStatus, after: RunStatus, now_s: float
) -> Iterator[dict[str, Any]]:
    """Events for what changed between two statuses; none for a run seen for the first time."""
    if not before.conditions:
        return
    for kind in _FOLLOWED:
        old, new = before.condition(kind), after.condition(kind)
        if old is None or new is None or (old.status, old.reason) == (new.status, new.reason):
            continue
        yield _event(record, new, now_s)


def _event(record: RunRecord, condition: StatusCondition, now_s: float) -> dict[str, Any]:
    key = record.key
    content = f"{record.uid}/{condition.type}/{condition.reason}/{int(now_s)}"
    suffix = hashlib.sha256(content.encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{key.name}.{suffix}", "namespace": key.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": key.name,
            "namespace": key.namespace,
            "uid": record.uid,
        },
        "type": "Warning" if _is_bad(condition) else "Normal",
        "reason": condition.reason,
        "message": f"{condition.type}: {condition.message}",
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "firstTimestamp": rfc3339(now_s),
        "lastTimestamp": rfc3339(now_s),
        "count": 1,
    }


def _is_bad(condition: StatusCondition) -> bool:
    if condition.type == "Failed":
        return condition.status == "True"
    if condition.reason in _NORMAL_REASONS:
        return False
    return condition.type in _BAD_WHEN_FALSE and condition.status == "False"
