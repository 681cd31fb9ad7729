"""Events: what `kubectl describe` shows of a run's changes. Pure.

There is one event for each followed condition that changed its status or reason, and one for each
limit that the control loop changed. Bad states are Warnings, also at the first reconcile. Events
compare with the stored status, so a restarted operator repeats none. Programs should read the
status: a lost event loses nothing.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, Final

from vcpo.api import API_VERSION, KIND
from vcpo.control.limits import ChangeKind, lag_change_kind, lag_change_sentence
from vcpo_operator.names import FIELD_MANAGER
from vcpo_operator.observed.pod_causes import DISRUPTIONS, redact_and_shorten
from vcpo_operator.observed.records import ObservedChild, RunRecord
from vcpo_operator.observed.status import RunStatus, StatusCondition, rfc3339

_MAX_CAUSE_CHARACTERS: Final = 600
_FOLLOWED: Final = (
    *("Accepted", "LearnerReady", "RolloutsReady", "SignalsFresh", "EssHealthy", "Stable"),
    *("UpToDate", "Suspended", "Ready", "Complete", "Failed"),
)
_REPEATING: Final = {"Ready", "Stable"}
"""Conditions that may only repeat another one, which has the event."""
_BAD_WHEN_FALSE: Final = {*_FOLLOWED[:6], "Ready"}
_UNKNOWN_WITHOUT_SIGNALS: Final = {"SignalsFresh", "EssHealthy", "Stable"}
"""Conditions that are Unknown while nothing is known of them: neither their loss nor their return
to a good state is news, since other events tell of the learner."""
_BAD_REASONS: Final = {"Collapsed", "LogDamaged", "PartiallyAvailable", "Warn"}
"""Reasons of conditions that hold, but not for certain."""
_NORMAL_REASONS: Final = {
    *DISRUPTIONS,
    *("BelowMinimum", "Ended", "Initializing", "Missing"),
    *("PodPending", "SchedulingGated", "Suspended"),
}


def transition_events(
    record: RunRecord, before: RunStatus, after: RunStatus, now_s: float
) -> Iterator[dict[str, Any]]:
    """Yield an event for each change between two statuses.

    A condition that is set for the first time yields an event only if it is bad.
    """
    is_new_attempt = before.holds("Failed") and not after.holds("Failed")
    named = (after.condition(kind) for kind in ("Accepted", "Complete", "Failed"))
    others = {(each.reason, each.message) for each in named if each is not None}
    for kind in _FOLLOWED:
        old, new = before.condition(kind), after.condition(kind)
        if kind == "Failed" and is_new_attempt:
            message = "The spec was edited: the run starts again."
            yield _event(record, "TriedAgain", message, now_s)
            continue
        if new is None or (kind in _REPEATING and (new.reason, new.message) in others):
            continue
        is_bad = _is_bad(new)
        if _is_news(old, new, is_bad=is_bad):
            message = f"{new.type}: {new.message}"
            # Alone, Fresh and Stale would not say of what.
            reason = f"Signals{new.reason}" if kind == "SignalsFresh" else new.reason
            yield _event(record, reason, message, now_s, is_bad=is_bad)
    if after.learner.replaced and not before.learner.replaced:
        yield _event(record, "RanksRestarted", _lost_ranks(before, after), now_s, is_bad=True)
    for reason, message in _scalings(before, after):
        yield _event(record, reason, message, now_s)
    yield from _lag_events(record, before, after, now_s)


def recreated_event(record: RunRecord, child: ObservedChild, now_s: float) -> dict[str, Any]:
    """Return the event for a child that somebody deleted and the operator created again."""
    message = f"{child.kind.kind} {child.name} was deleted by another client and is created again."
    return _event(record, "Recreated", message, now_s, is_bad=True)


def _lost_ranks(before: RunStatus, after: RunStatus) -> str:
    """Return why all pods of the learner are replaced, in a sentence."""
    end = after.learner.last_end
    why = "A pod of the learner is gone"
    if end is not None and after.learner.restarts > before.learner.restarts:
        cause = redact_and_shorten(" ".join(end.message.split()), _MAX_CAUSE_CHARACTERS)
        why = f"Pod {end.pod} ended with exit code {end.exit_code} ({end.reason})"
        why += f": {cause}" if cause else ""
    return f"{why}. All ranks start again together, from the last checkpoint."


def _is_news(old: StatusCondition | None, new: StatusCondition, *, is_bad: bool) -> bool:
    if old is not None and (old.status, old.reason) == (new.status, new.reason):
        return False
    was_known = old is not None
    if new.type in _UNKNOWN_WITHOUT_SIGNALS:
        if new.status == "Unknown":
            return False
        was_known = old is not None and old.status != "Unknown"
    return was_known or is_bad


def _scalings(before: RunStatus, after: RunStatus) -> Iterator[tuple[str, str]]:
    desired = {group.name: group.desired for group in before.groups}
    for group in after.groups:
        old = desired.get(group.name)
        if old is not None and old != group.desired:
            yield "Scaled", f"Rollout group '{group.name}' {old} -> {group.desired} workers."


def _lag_events(
    record: RunRecord, before: RunStatus, after: RunStatus, now_s: float
) -> Iterator[dict[str, Any]]:
    """Yield the change of the lag limit, with the reason of the decision that made it.

    A limit that fell because `algorithm.maxPolicyLagSteps` was edited has no decision.
    """
    lag, new_lag = before.lag_limit_steps, after.lag_limit_steps
    if lag is None or new_lag is None or lag == new_lag:
        return
    decision = after.last_decision
    is_decided = decision is not None and decision != before.last_decision
    kind, why = lag_change_kind(lag, new_lag), decision.reason if decision and is_decided else ""
    is_bad = is_decided and kind is ChangeKind.THROTTLED
    yield _event(record, kind.value, lag_change_sentence(lag, new_lag, why), now_s, is_bad=is_bad)


def _event(
    record: RunRecord, reason: str, message: str, now_s: float, *, is_bad: bool = False
) -> dict[str, Any]:
    key = record.key
    content = f"{record.uid}/{message}/{reason}/{int(now_s)}"
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
        "type": "Warning" if is_bad else "Normal",
        "reason": reason,
        "message": message,
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
    if condition.reason in _BAD_REASONS:
        return True
    return condition.type in _BAD_WHEN_FALSE and condition.status == "False"
