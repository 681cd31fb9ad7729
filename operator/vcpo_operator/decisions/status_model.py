"""The status of a run as a value, and its form in the object.

Times are Unix seconds here and RFC 3339 in the object, to the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Self

from vcpo.control.limits import ChangeKind, LimitChange
from vcpo.control.signals import RunSignals
from vcpo_operator.decisions.restarts import Restarts
from vcpo_operator.names import Role
from vcpo_operator.observed.records import ContainerEnd, ObservedState


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusCondition:
    """One condition as Kubernetes stores it."""

    type: str
    status: str
    reason: str
    message: str
    transition_s: float
    """Unix time at which `status` changed last."""
    observed_generation: int = 0

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        """Read an entry of `status.conditions`."""
        return cls(
            type=entry["type"],
            status=entry["status"],
            reason=entry["reason"],
            message=entry["message"],
            transition_s=from_rfc3339(entry["lastTransitionTime"]) or 0.0,
            observed_generation=int(entry.get("observedGeneration", 0)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `status.conditions`."""
        return {
            "type": self.type,
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
            "lastTransitionTime": rfc3339(self.transition_s),
            "observedGeneration": self.observed_generation,
        }


_SUMMARIES: Final = frozenset({"Initializing", "Degraded"})
"""Reasons of `Ready` that say only that something is missing."""
_NO_CAUSES: Final = frozenset(
    {
        "PodPending",
        "BelowMinimum",
        "LearnerCannotStart",
        "Suspended",
        "Ended",
        "Missing",
        "Stale",
    }
)
"""Reasons of a missing part that say no more than that."""

_SIGNALS: Final[Mapping[str, str | Mapping[str, str]]] = {
    "step": "step",
    "policyVersion": "policy_version",
    "essRatio": "ess_ratio",
    "onPolicyEssRatio": "on_policy_ess_ratio",
    "rewardMean": "reward_mean",
    "tokensPerSecond": "tokens_per_s",
    "trajectories": {"buffered": "buffered", "inFlight": "in_flight"},
    "learningRate": {
        "effective": "learning_rate",
        "schedule": "learning_rate_schedule",
        "scale": "learning_rate_scale",
        "backoff": "learning_rate_backoff",
    },
    "evaluationAccuracy": "accuracy",
    "lag": {"p50": "lag_p50", "max": "lag_max"},
    "warning": {"level": "warning_level", "score": "warning_score"},
}
"""Fields of `status` that show the learner's signals, by the attributes of `RunSignals`."""
_SMALL: Final = 0.1
"""A smaller number is rounded to digits that count; learning rates are small."""


def shown_signals(signals: RunSignals) -> dict[str, Any]:
    """Return the fields of `status` that show signals, without what is not measured yet."""
    return _select_fields(signals, _SIGNALS)


def _select_fields(
    signals: RunSignals, fields: Mapping[str, str | Mapping[str, str]]
) -> dict[str, Any]:
    values = {
        name: _round(getattr(signals, shown))
        if isinstance(shown, str)
        else _select_fields(signals, shown) or None
        for name, shown in fields.items()
    }
    return _without_none(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """Workers of one rollout group."""

    name: str
    desired: int
    replicas: int
    ready: int
    scaled_s: float | None = None

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        """Read an entry of `status.rollouts`."""
        return cls(
            name=entry["name"],
            desired=int(entry.get("desiredReplicas", 0)),
            replicas=int(entry.get("replicas", 0)),
            ready=int(entry.get("readyReplicas", 0)),
            scaled_s=from_rfc3339(entry.get("lastScaleTime")),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `status.rollouts`."""
        return _without_none(
            {
                "name": self.name,
                "desiredReplicas": self.desired,
                "replicas": self.replicas,
                "readyReplicas": self.ready,
                "lastScaleTime": rfc3339(self.scaled_s),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LastDecision:
    """The newest change of the lag limit, and why it was made."""

    time_s: float
    kind: ChangeKind
    before: int
    after: int
    """Lag limit before and after, in policy versions."""
    reason: str
    """A clause without a full stop."""

    @classmethod
    def of(cls, change: LimitChange) -> Self:
        """Return a change of the lag limit as the status holds it."""
        return cls(
            time_s=float(int(change.decided_s)),
            kind=change.kind,
            before=change.before,
            after=change.after,
            reason=change.reason,
        )

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        """Read `status.lastDecision`."""
        return cls(
            time_s=from_rfc3339(entry["time"]) or 0.0,
            kind=ChangeKind(entry["kind"]),
            before=int(entry["from"]),
            after=int(entry["to"]),
            reason=entry["reason"],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return `status.lastDecision`."""
        return {
            "time": rfc3339(self.time_s),
            "kind": self.kind.value,
            "from": self.before,
            "to": self.after,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """All fields of `status`."""

    observed_generation: int = 0
    conditions: tuple[StatusCondition, ...] = ()
    start_s: float | None = None
    admission_s: float | None = None
    """Unix time at which the learner and a worker had a node; deadlines count from it."""
    first_step_s: float | None = None
    completion_s: float | None = None
    drain_s: float | None = None
    updated_s: float | None = None
    lag_limit_steps: int | None = None
    last_decision: LastDecision | None = None
    restarts: Restarts = field(default_factory=Restarts)
    learner_pods: str = ""
    """Pods of the learner, ready/desired."""
    lost_pod: str = field(default="", compare=False)
    """Which pod of the learner took the others with it, and why, as a clause; not stored."""
    last_end: ContainerEnd | None = None
    """How the learner's container ended last; kept after its pod is gone."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The learner's last known signals (`shown_signals`)."""
    verdict: str = ""
    """What is the matter with the run and what to do, by its last signals; empty before them."""
    groups: tuple[GroupStatus, ...] = ()
    revision: str = ""
    """Name of the revision of the run's pods; empty before the first."""
    pending_revision: str = ""
    """Name of the newest one, if the pods are not of it."""
    control: Mapping[str, Any] = field(default_factory=dict)
    """`ControlState.to_dict()`; empty before the first decision."""

    def condition(self, kind: str) -> StatusCondition | None:
        """Return the condition of a type; None when it was never set."""
        return next((each for each in self.conditions if each.type == kind), None)

    @property
    def reason(self) -> str | None:
        """The cause of `Ready`, one word: that of a part, if `Ready` only says that one is missing.

        None before the first reconcile.
        """
        ready = self.condition("Ready")
        if ready is None or ready.reason not in _SUMMARIES:
            return None if ready is None else ready.reason
        names = ("LearnerReady", "RolloutsReady", "SignalsFresh")
        parts = (self.condition(kind) for kind in names)
        causes = (part.reason for part in parts if part is not None and part.status == "False")
        return next((cause for cause in causes if cause not in _NO_CAUSES), ready.reason)

    def holds(self, kind: str) -> bool:
        """Whether a condition has the status True."""
        condition = self.condition(kind)
        return condition is not None and condition.status == "True"

    def with_restarts(self, observed: ObservedState, *, num_pods: int) -> RunStatus:
        """Return the status with the learner's restarts counted, and how it ended last.

        num_pods: Pods of the learner that the spec asks for.
        """
        pods = observed.pods_of(Role.LEARNER)
        if not pods and num_pods == 1:
            return self
        ends = self.restarts.ends_now(pods)
        if num_pods == 1:  # a message may come later than the restart
            ends = [pod.last_end for pod in pods if pod.last_end is not None]
        step = int(self.numbers.get("step", 0))
        restarts = self.restarts.with_pods(pods, num_pods=num_pods, step=step)
        lost = self._lost_pod(observed) if restarts.replaced else ""
        last_end = ends[0] if ends else self.last_end
        return replace(self, restarts=restarts, last_end=last_end, lost_pod=lost)

    def _lost_pod(self, observed: ObservedState) -> str:
        """Return which pod of the group is gone or leaves, as a clause; empty if none is known."""
        group = [pod for pod in observed.pods if pod.uid in self.restarts.group]
        for pod in group:
            if pod.terminating:
                told = pod.cause
                why = "" if told is None else f" ({told.reason}): {told.message.partition(': ')[2]}"
                return f"Pod {pod.name} is being deleted{why.rstrip('.')}"
        gone = set(range(len(self.restarts.group))) - {pod.index for pod in group}
        if observed.learner is None or not gone:
            return ""
        return f"Pod {observed.learner.child.name}-{min(gone)} is gone"

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        """Read a status; missing fields keep their defaults.

        Raises: ValueError when this operator cannot have written it.
        """
        try:
            learner = entry.get("learner") or {}
            last_end = learner.get("lastTermination")
            decision = entry.get("lastDecision")
            return cls(
                observed_generation=int(entry.get("observedGeneration", 0)),
                conditions=tuple(map(StatusCondition.from_dict, entry.get("conditions") or ())),
                start_s=from_rfc3339(entry.get("startTime")),
                admission_s=from_rfc3339(entry.get("admissionTime")),
                first_step_s=from_rfc3339(entry.get("firstStepTime")),
                completion_s=from_rfc3339(entry.get("completionTime")),
                drain_s=from_rfc3339(entry.get("drainTime")),
                updated_s=from_rfc3339(entry.get("updateTime")),
                lag_limit_steps=entry.get("admissionLagSteps"),
                last_decision=None if decision is None else LastDecision.from_dict(decision),
                restarts=Restarts.from_dict(learner),
                learner_pods=learner.get("pods", ""),
                last_end=None if last_end is None else ContainerEnd.from_dict(last_end),
                numbers={name: entry[name] for name in _SIGNALS if name in entry},
                verdict=entry.get("verdict", ""),
                groups=tuple(map(GroupStatus.from_dict, entry.get("rollouts") or ())),
                revision=entry.get("revision", ""),
                pending_revision=entry.get("pendingRevision", ""),
                control=dict(entry.get("control") or {}),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"status: not written by this operator ({error!r})") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the status in its form in the object, without fields that are None."""
        ready = sum(group.ready for group in self.groups)
        desired = sum(group.desired for group in self.groups)
        last_end = None if self.last_end is None else self.last_end.to_dict()
        learner = {
            "pods": self.learner_pods or None,
            **self.restarts.to_dict(),
            "lastTermination": last_end,
        }
        document = {
            "observedGeneration": self.observed_generation,
            "reason": self.reason,
            "conditions": [each.to_dict() for each in self.conditions],
            "startTime": rfc3339(self.start_s),
            "admissionTime": rfc3339(self.admission_s),
            "firstStepTime": rfc3339(self.first_step_s),
            "completionTime": rfc3339(self.completion_s),
            "drainTime": rfc3339(self.drain_s),
            "updateTime": rfc3339(self.updated_s),
            **self.numbers,
            "verdict": self.verdict or None,
            "admissionLagSteps": self.lag_limit_steps,
            "lastDecision": None if self.last_decision is None else self.last_decision.to_dict(),
            "learner": _without_none(learner),
            "rollouts": [each.to_dict() for each in self.groups],
            "workers": f"{ready}/{desired}" if self.groups else None,
            "revision": self.revision or None,
            "pendingRevision": self.pending_revision or None,
            "control": dict(self.control) or None,
        }
        return _without_none(document)


def rfc3339(time_s: float | None) -> str | None:
    """Write a Unix time as Kubernetes does; None stays None."""
    if time_s is None:
        return None
    return datetime.fromtimestamp(int(time_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def from_rfc3339(text: str | None) -> float | None:
    """Read a time that Kubernetes wrote, as Unix time; None stays None."""
    return None if text is None else datetime.fromisoformat(text).timestamp()


def _without_none(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if value is not None}


def _round(value: Any) -> Any:
    """Round a float for a column of `kubectl get`: to four decimals, or four digits of a rate."""
    if not isinstance(value, float):
        return value
    return round(value, 4) if abs(value) >= _SMALL else float(f"{value:.4g}")
