"""Conditions of a run: statements in words that people and programs may lean on. Pure.

| type | true when | reasons |
|---|---|---|
| Accepted | the spec can be used, by the API server as well | Accepted, InvalidSpec |
| LearnerReady | the learner answers | PodReady, PodPending, Suspended, Ended, pod-level reasons |
| RolloutsReady | enough workers answer | MinimumAvailable, PartiallyAvailable, BelowMinimum, same |
| SignalsFresh, EssHealthy, LearnerFed | see `vcpo.control.conditions` | |
| Suspended | nothing runs, on request | Suspended, SuspendInProgress, Active |
| Ready | the run trains, or is complete | Training, NoUpdate, GenerationFailing, Degraded, ... |
| Complete | all steps are taken | Succeeded, WithoutUpdate, NotFinished |
| Failed | the run was given up | reasons of `control.run_limits`, LearnerFailed, NotFailed |

Pod-level reasons are the words of Kubernetes: ImagePullBackOff, CrashLoopBackOff, OOMKilled,
Unschedulable, FailedCreate, FailedMount, NodeLost and their like. Every condition is set from the
first visit on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from vcpo.control import ControlDecision
from vcpo.spec import VCPORunSpec
from vcpo_operator.crd.status_schema import MAX_MESSAGE_CHARACTERS
from vcpo_operator.decisions.conflicts import Conflict, oversized_claims_note
from vcpo_operator.decisions.lifecycle import LifecyclePhase, RunVerdict, is_suspended
from vcpo_operator.decisions.status_model import RunStatus, StatusCondition
from vcpo_operator.names import Role
from vcpo_operator.observed.pod_causes import lost_node_cause, redact_and_shorten
from vcpo_operator.observed.records import Cause, ObservedPod, ObservedState
from vcpo_operator.observed.report import LearnerReport

_HEARD_S: Final = 15.0
"""Who was heard of within this time answers, whatever a probe has said or not said yet."""
_OVERDUE_S: Final = 30.0
"""A pod that has not ended so long after its grace period has a kubelet that does not answer."""
_HEARD_OF_WORK: Final = frozenset({"GenerationFailing", "NoUpdate"})
"""Reasons of `Ready` that only the learner can tell."""
CONTROL_CONDITIONS: Final = ("SignalsFresh", "EssHealthy", "LearnerFed")
"""Conditions of the control loop; their reasons may turn with every poll."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionState:
    """A condition as it is found now, without a history."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionInputs:
    """What the conditions of an accepted run are judged from."""

    spec: VCPORunSpec
    verdict: RunVerdict
    observed: ObservedState
    decision: ControlDecision | None
    """None while nothing is steered."""
    has_stepped: bool
    """Whether a step was taken since the start."""
    report: LearnerReport | None = None
    """The learner's newest report; None when there is none."""
    now_s: float = 0.0
    """Unix time."""
    conflict: Conflict | None = None
    """What stood in the way when the last plan was carried out; None when nothing did."""
    refusal: str = ""
    """Why the spec cannot be carried out as it is; empty when it can."""
    keeps_last_known_signals: bool = False
    """Whether what an earlier operator heard of the learner still stands."""
    before: RunStatus = field(default_factory=RunStatus)
    """As the last look left it."""


def condition_states(inputs: ConditionInputs) -> tuple[ConditionState, ...]:
    """Judge every condition."""
    learner = _learner(inputs)
    rollouts = _rollouts(inputs)
    control = () if inputs.keeps_last_known_signals else _control(inputs.decision)
    return (
        _accepted(inputs),
        learner,
        rollouts,
        *control,
        _suspended(inputs),
        _ready(inputs, (learner, rollouts, *control[:1])),
        _complete(inputs.verdict),
        _failed(inputs.verdict),
    )


def invalid_spec_conditions(message: str) -> tuple[ConditionState, ...]:
    """The conditions of a run whose spec cannot be used; nothing else is judged."""
    return (
        _false("Accepted", "InvalidSpec", message),
        _false("Ready", "InvalidSpec", message),
    )


def retry_delayed_conditions(trouble: str) -> tuple[ConditionState, ...]:
    """The condition of a failed run that cannot be tried again yet; nothing else is judged."""
    return (_false("Ready", "ApplyFailed", trouble),)


def merge_conditions(
    found: Iterable[ConditionState], before: RunStatus, *, generation: int, now_s: float
) -> tuple[StatusCondition, ...]:
    """Give conditions their history: a transition time that moves only with the status.

    Conditions that were not judged stay as they were.
    """
    judged = {each.type: _dated(each, before, generation, now_s) for each in found}
    kept = (each for each in before.conditions if each.type not in judged)
    return (*judged.values(), *kept)


def _dated(
    found: ConditionState, before: RunStatus, generation: int, now_s: float
) -> StatusCondition:
    known = before.condition(found.type)
    same = known is not None and known.status == found.status
    return StatusCondition(
        type=found.type,
        status=found.status,
        reason=found.reason,
        message=redact_and_shorten(found.message, MAX_MESSAGE_CHARACTERS),
        transition_s=known.transition_s if known is not None and same else float(int(now_s)),
        observed_generation=generation,
    )


def _accepted(inputs: ConditionInputs) -> ConditionState:
    if inputs.refusal:
        return _false("Accepted", "InvalidSpec", inputs.refusal)
    note = oversized_claims_note(inputs.spec.learner, inputs.observed.claims.values())
    return _true("Accepted", "Accepted", f"The spec is valid. {note}".rstrip())


def _learner(inputs: ConditionInputs) -> ConditionState:
    pods = inputs.observed.pods_of(Role.LEARNER)
    resting = _resting("LearnerReady", inputs, pods)
    if resting is not None:
        return resting
    if any(pod.ready for pod in pods) or (pods and _answers(inputs.report)):
        return _true("LearnerReady", "PodReady", "The learner answers.")
    learner = inputs.observed.learner
    cause = _first_cause(pods) or _stuck(inputs) or (None if learner is None else learner.cause)
    if cause is not None:
        return _false("LearnerReady", cause.reason, cause.message)
    return _false("LearnerReady", "PodPending", "The learner's pod is not ready yet.")


def _rollouts(inputs: ConditionInputs) -> ConditionState:
    pods = inputs.observed.pods_of(Role.ROLLOUT)
    resting = _resting("RolloutsReady", inputs, pods)
    if resting is not None:
        return resting
    heard = _heard_workers(inputs.report)
    ready = sum(pod.ready or pod.name in heard for pod in pods)
    least = max(1, sum(group.min_replicas for group in inputs.spec.rollouts))
    refused = _refused_pods(inputs)
    if ready >= least:
        message = "The least number of workers answers."
        if refused is None:
            return _true("RolloutsReady", "MinimumAvailable", message)
        message += f" More cannot be made: {refused.message}"
        return _true("RolloutsReady", "PartiallyAvailable", message)
    cause = _first_cause(pods) or refused
    if cause is not None:
        return _false("RolloutsReady", cause.reason, cause.message)
    message = f"Fewer workers answer than the {least} that are the least."
    return _false("RolloutsReady", "BelowMinimum", message)


def _resting(kind: str, inputs: ConditionInputs, pods: list[ObservedPod]) -> ConditionState | None:
    if inputs.verdict.phase is LifecyclePhase.SUSPEND:
        return _false(kind, "Suspended", "The run is suspended.")
    if inputs.verdict.has_ended and not any(pod.ready for pod in pods):
        return _false(kind, "Ended", "The run has ended.")
    return None


def _answers(report: LearnerReport | None) -> bool:
    """Whether the learner itself has spoken just now: its pod's probes are seconds behind."""
    return report is not None and not report.is_silent and report.signals.age_s <= _HEARD_S


def _heard_workers(report: LearnerReport | None) -> frozenset[str]:
    """Names of the workers' pods that the learner has just heard of."""
    if report is None or not _answers(report):
        return frozenset()
    workers = report.workers.items()
    age_s = report.signals.age_s
    return frozenset(name for name, each in workers if each.silent_s + age_s <= _HEARD_S)


def _first_cause(pods: Iterable[ObservedPod]) -> Cause | None:
    """The cause to put right first; a pod that ended and was replaced counts last."""
    told = [pod for pod in pods if pod.cause is not None and not pod.ready]
    return min(told, key=lambda pod: pod.has_ended).cause if told else None


def _stuck(inputs: ConditionInputs) -> Cause | None:
    """Why a learner's pod that should have ended has not, and holds the place of the next one."""
    for pod in inputs.observed.pods:
        if pod.role is not Role.LEARNER or not pod.leaving:
            continue
        if pod.cause is not None and pod.cause.reason == "NodeLost":
            return pod.cause
        if pod.gone_by_s is not None and inputs.now_s > pod.gone_by_s + _OVERDUE_S:
            return lost_node_cause(pod.name, pod.node)
    return None


def _refused_pods(inputs: ConditionInputs) -> Cause | None:
    """Why pods of some rollout group cannot be made; None when all can."""
    groups = (inputs.observed.groups.get(group.name) for group in inputs.spec.rollouts)
    causes = (group.cause for group in groups if group is not None)
    return next((cause for cause in causes if cause is not None), None)


def _control(decision: ControlDecision | None) -> tuple[ConditionState, ...]:
    if decision is None:
        message = "Nothing is steered while the run does not run."
        return tuple(_unknown(kind, "NotRunning", message) for kind in CONTROL_CONDITIONS)
    return tuple(
        ConditionState(
            type=each.type.value,
            status=each.status.value,
            reason=each.reason.value,
            message=each.message,
        )
        for each in decision.conditions
    )


def _suspended(inputs: ConditionInputs) -> ConditionState:
    if not is_suspended(inputs.spec, inputs.verdict):
        return _false("Suspended", "Active", "The run is not suspended.")
    if inputs.observed.pods:
        return _false("Suspended", "SuspendInProgress", "Pods are on their way out.")
    return _true("Suspended", "Suspended", "Nothing runs; set `spec.suspend` to false to go on.")


def _ready(inputs: ConditionInputs, parts: tuple[ConditionState, ...]) -> ConditionState:
    verdict = inputs.verdict
    if verdict.phase is LifecyclePhase.COMPLETE:
        return _true("Ready", "Complete", verdict.message)
    if verdict.phase is LifecyclePhase.FAILED:
        return _false("Ready", verdict.reason, verdict.message)
    if inputs.refusal:
        return _false("Ready", "InvalidSpec", inputs.refusal)
    if inputs.conflict is not None:
        return _false("Ready", inputs.conflict.reason, inputs.conflict.message)
    if verdict.phase is LifecyclePhase.SUSPEND:
        return _false("Ready", "Suspended", "The run is suspended.")
    missing = next((part for part in parts if part.status != "True"), None)
    if missing is not None:
        reason = "Degraded" if inputs.has_stepped else "Initializing"
        message = f"{missing.type} ({missing.reason}): {missing.message}"
        return _false("Ready", reason, f"{message}{_failing(inputs.report)}")
    if not inputs.has_stepped:
        message = f"The first step has not been taken yet.{_failing(inputs.report)}"
        return _false("Ready", "Initializing", message)
    return _training(inputs)


def _training(inputs: ConditionInputs) -> ConditionState:
    """Ready, of a run that has all its parts and has taken a step."""
    report, policy = inputs.report, inputs.spec.failure_policy
    known = inputs.before.condition("Ready")
    if inputs.keeps_last_known_signals and known is not None and known.reason in _HEARD_OF_WORK:
        return ConditionState(
            type=known.type, status=known.status, reason=known.reason, message=known.message
        )
    if report is not None and report.failures_in_a_row >= policy.max_failures_in_a_row:
        why = report.latest_generation_failure or _failing(report).lstrip()
        return _false("Ready", "GenerationFailing", why)
    if report is not None and report.no_update:
        return _true("Ready", "NoUpdate", report.no_update)
    return _true("Ready", "Training", "The run trains.")


def _failing(report: LearnerReport | None) -> str:
    """Why nothing is generated, as the end of a message; empty when something is."""
    if report is None or report.failures_in_a_row == 0:
        return ""
    count, latest = report.failures_in_a_row, report.latest_generation_failure
    rest = f", the latest so: {latest}" if latest else "; the learner's log says of what."
    return f" {count} generations in a row have failed{rest}"


def _complete(verdict: RunVerdict) -> ConditionState:
    if verdict.phase is LifecyclePhase.COMPLETE:
        return _true("Complete", verdict.reason, verdict.message)
    return _false("Complete", "NotFinished", "Not all steps are taken.")


def _failed(verdict: RunVerdict) -> ConditionState:
    if verdict.phase is LifecyclePhase.FAILED:
        return _true("Failed", verdict.reason, verdict.message)
    return _false("Failed", "NotFailed", "The run was not given up.")


def _true(kind: str, reason: str, message: str) -> ConditionState:
    return ConditionState(type=kind, status="True", reason=reason, message=message)


def _false(kind: str, reason: str, message: str) -> ConditionState:
    return ConditionState(type=kind, status="False", reason=reason, message=message)


def _unknown(kind: str, reason: str, message: str) -> ConditionState:
    return ConditionState(type=kind, status="Unknown", reason=reason, message=message)
