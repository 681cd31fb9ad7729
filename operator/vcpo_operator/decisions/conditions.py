"""Conditions of a run: statements on which people and programs rely. Pure.

| type | true when | reasons |
|---|---|---|
| Accepted | the spec can be used, by the API server as well | Accepted, InvalidSpec |
| LearnerReady | it answers | PodReady, LogDamaged, PodPending, Suspended, Ended, pod reasons |
| RolloutsReady | enough workers answer | MinimumAvailable, PartiallyAvailable, BelowMinimum, same |
| SignalsFresh | it reports signals | Fresh, Stale, Missing, Unreachable, KeyRefused |
| EssHealthy, LearnerFed | see `vcpo.control.conditions` | |
| Stable | see there; false after a collapse | those, Collapsed |
| UpToDate | the pods are of the newest revision | Current, RevisionPending, Ended |
| Suspended | no pod runs, at the user's request | Suspended, SuspendInProgress, Active |
| Ready | the run trains, or is complete | Training, NoUpdate, EnginesDisagree, Degraded, ... |
| Complete | all steps are taken | Succeeded, Collapsed, WithoutUpdate, NotFinished |
| Failed | the run failed | LearnerFailed, reasons of `vcpo.control.run_limits`, NotFailed |

Pod-level reasons are those of Kubernetes: ImagePullBackOff, CrashLoopBackOff, OOMKilled,
Unschedulable, FailedCreate, NodeLost and similar. The first reconcile sets every
condition.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from vcpo import judgement
from vcpo.api import VCPORunSpec
from vcpo.control.conditions import Condition
from vcpo.control.decision import ControlDecision
from vcpo.control.signals import RunSignals
from vcpo_operator.decisions.conflicts import Conflict
from vcpo_operator.decisions.lifecycle import COLLAPSED, LifecyclePhase, RunVerdict
from vcpo_operator.names import Role
from vcpo_operator.observed.pod_causes import lost_node_cause, redact_and_shorten
from vcpo_operator.observed.records import Cause, ObservedPod, ObservedState
from vcpo_operator.observed.status import MAX_MESSAGE_CHARACTERS, RunStatus, StatusCondition

_CONTACT_S: Final = 15.0
"""A process that was in contact within this time answers, whatever its pod's probes say."""
_SETTLING_S: Final = 15.0
"""Time after a pod became ready in which an older failure of a call to it may still be known."""
_YOUNG_S: Final = 10.0
"""A pod may be without a node for this time: its volume is being made."""
_HELD_STEPS: Final = 3 * judgement.NOTICE_AFTER_STEPS
_NAMED_PODS: Final = 4
"""Pods that a message names; of more it says how many."""
_OVERDUE_S: Final = 30.0
"""A pod that still exists this long after its grace period is on a node that does not answer."""
_REASONS_FROM_LEARNER: Final = frozenset(
    {"GenerationFailing", "NoUpdate", "EnginesDisagree", "WorkersSetAside"}
)
"""Reasons of `Ready` that only the learner can report."""
CONTROL_CONDITIONS: Final = ("SignalsFresh", "EssHealthy", "LearnerFed", "Stable")
"""Conditions of the control loop; their reasons may change with every poll."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoUpdate:
    """What is said of the last steps, which made no update."""

    step: int
    message: str


def decide_no_update(
    signals: RunSignals | None, total_steps: int, before: RunStatus, said: NoUpdate | None
) -> NoUpdate | None:
    """Return what is to be said of steps without an update; None: nothing.

    On a task that is nearly solved, an update now and then is no news: what was said stands until
    enough steps went by without it being said again.
    said: What this operator said last; without it, what the run's status says counts.
    """
    if signals is None:
        return said
    if message := judgement.unmoved(signals, total_steps):
        return NoUpdate(step=signals.step, message=message)
    known = before.condition("Ready")
    if said is None and known is not None and known.reason == "NoUpdate":
        return NoUpdate(step=signals.step, message=known.message)
    return said if said and signals.step < said.step + _HELD_STEPS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionInputs:
    """The facts from which the conditions of an accepted run follow; see `decisions.snapshot`."""

    spec: VCPORunSpec
    verdict: RunVerdict
    observed: ObservedState
    decision: ControlDecision | None
    has_stepped: bool
    signals: RunSignals | None = None
    silence: Cause | None = None
    now_s: float = 0.0
    conflict: Conflict | None = None
    refusal: str = ""
    note: str = ""
    keeps_last_known_signals: bool = False
    before: RunStatus = field(default_factory=RunStatus)
    no_update: NoUpdate | None = None
    pending: str | None = None


def condition_states(inputs: ConditionInputs) -> tuple[Condition, ...]:
    """Return every condition as it is now."""
    learner = _learner_condition(inputs)
    rollouts = _rollouts_condition(inputs)
    control = () if inputs.keeps_last_known_signals else _control_conditions(inputs)
    return (
        _accepted_condition(inputs),
        learner,
        rollouts,
        *control,
        *_collapsed_conditions(inputs.verdict),
        *_revision_conditions(inputs),
        _suspended_condition(inputs),
        _ready_condition(inputs, (learner, rollouts, *control[:1])),
        *_end_conditions(inputs.verdict),
    )


def invalid_spec_conditions(message: str) -> tuple[Condition, ...]:
    """Return the conditions of a run whose spec cannot be used; the others stay as they were."""
    return (_false("Accepted", "InvalidSpec", message), _false("Ready", "InvalidSpec", message))


def retry_delayed_conditions(error: str) -> tuple[Condition, ...]:
    """Return the condition of a failed run that cannot start again yet; the others stay."""
    return (_false("Ready", "ApplyFailed", error),)


def merge_conditions(
    states: Iterable[Condition], before: RunStatus, *, generation: int, now_s: float
) -> tuple[StatusCondition, ...]:
    """Return the conditions with their history; those not in `states` stay as they were.

    The transition time of a condition changes only with its status. Their order is that of their
    types, whichever are set first: another order would be another write.
    """
    merged = {}
    for state in states:
        known = before.condition(state.type)
        same = known is not None and known.status == state.status
        merged[state.type] = StatusCondition(
            type=state.type,
            status=state.status,
            reason=state.reason,
            message=redact_and_shorten(state.message, MAX_MESSAGE_CHARACTERS),
            transition_s=known.transition_s if known is not None and same else float(int(now_s)),
            observed_generation=generation,
        )
    by_type = {each.type: each for each in before.conditions} | merged
    return tuple(by_type[kind] for kind in sorted(by_type))


def _accepted_condition(inputs: ConditionInputs) -> Condition:
    if inputs.refusal:
        return _false("Accepted", "InvalidSpec", inputs.refusal)
    return _true("Accepted", "Accepted", f"The spec is valid. {inputs.note}".rstrip())


def _learner_condition(inputs: ConditionInputs) -> Condition:
    pods = inputs.observed.pods_of(Role.LEARNER)
    resting = _resting_condition("LearnerReady", inputs, pods)
    if resting is not None:
        return resting
    others = [pod for pod in pods if pod.index > 0]
    missing = inputs.spec.learner.replicas - len(pods)
    is_whole = missing <= 0 and _first_cause(others, inputs.now_s) is None
    if is_whole and _leader_answers(inputs, pods):
        return _answering_learner(inputs)
    cause = (
        _first_cause(pods, inputs.now_s) or _stuck_pod(inputs) or _leaving_pod(inputs, Role.LEARNER)
    )
    if cause is not None:
        return _false("LearnerReady", cause.reason, cause.message)
    return _false("LearnerReady", "PodPending", _pending(inputs, pods))


def _answering_learner(inputs: ConditionInputs) -> Condition:
    lost = inputs.signals.lost_changes if inputs.signals else 0
    known = inputs.before.condition("LearnerReady")
    if inputs.keeps_last_known_signals and known and known.reason == "LogDamaged":
        return _true(known.type, known.reason, known.message)
    if not lost:
        return _true("LearnerReady", "PodReady", "The learner answers.")
    message = (
        f"The learner answers. When it started, {lost} committed changes were missing in its redo"
        " log: the event `LogDamaged` in its log says what is taken anew."
    )
    return _true("LearnerReady", "LogDamaged", message)


def _leader_answers(inputs: ConditionInputs, pods: Iterable[ObservedPod]) -> bool:
    """Whether the first pod answers, in which rank 0 is; the others then have met it."""
    leader = next((pod for pod in pods if pod.index == 0), None)
    if leader is None:
        return False
    # The pod's probes lag by seconds, so signals of the learner itself count as well.
    signals = inputs.signals
    return leader.ready or (signals is not None and signals.has_contact(_CONTACT_S))


def _pending(inputs: ConditionInputs, pods: list[ObservedPod]) -> str:
    wanted, learner = inputs.spec.learner.replicas, inputs.observed.learner
    if wanted == 1 or learner is None:
        return "The learner's pod is not ready yet."
    ready = {pod.index for pod in pods if pod.ready}
    waited_for = [index for index in range(wanted) if index not in ready]
    named = ", ".join(f"{learner.child.name}-{index}" for index in waited_for[:_NAMED_PODS])
    more = f" and {len(waited_for) - _NAMED_PODS} more" if len(waited_for) > _NAMED_PODS else ""
    return f"{len(ready)} of the learner's {wanted} pods are ready; waiting for {named}{more}."


def _rollouts_condition(inputs: ConditionInputs) -> Condition:
    pods, groups = inputs.observed.pods_of(Role.ROLLOUT), inputs.spec.rollouts
    resting = _resting_condition("RolloutsReady", inputs, pods)
    if resting is not None:
        return resting
    signals = inputs.signals
    in_contact = signals.workers_in_contact(_CONTACT_S) if signals else frozenset()
    ready = sum(pod.ready or pod.name in in_contact for pod in pods)
    minimum = max(1, sum(group.min_replicas for group in groups))
    observed_groups = (inputs.observed.groups.get(group.name) for group in groups)
    refused = next((group.cause for group in observed_groups if group and group.cause), None)
    if ready >= minimum:
        message = "At least the minimum number of workers answers."
        if refused is None:
            return _true("RolloutsReady", "MinimumAvailable", message)
        more = f" More cannot be created: {refused.message}"
        return _true("RolloutsReady", "PartiallyAvailable", message + more)
    cause = _first_cause(pods, inputs.now_s) or refused or _leaving_pod(inputs, Role.ROLLOUT)
    if cause is not None:
        return _false("RolloutsReady", cause.reason, cause.message)
    message = f"Fewer workers answer than the minimum of {minimum}."
    return _false("RolloutsReady", "BelowMinimum", message)


def _resting_condition(
    kind: str, inputs: ConditionInputs, pods: list[ObservedPod]
) -> Condition | None:
    """Return the condition of pods that should not be there; None when they should."""
    if inputs.verdict.phase is LifecyclePhase.SUSPEND:
        return _false(kind, "Suspended", "The run is suspended.")
    if inputs.verdict.has_ended and not any(pod.ready for pod in pods):
        return _false(kind, "Ended", "The run has ended.")
    return None


def _first_cause(pods: Iterable[ObservedPod], now_s: float) -> Cause | None:
    broken = [
        (pod.is_finished, pod.cause)
        for pod in pods
        if pod.cause and not pod.ready and not _is_young(pod, pod.cause, now_s)
    ]
    return min(broken, key=operator.itemgetter(0))[1] if broken else None


def _is_young(pod: ObservedPod, cause: Cause, now_s: float) -> bool:
    return cause.reason == "Unschedulable" and not pod.node and now_s - pod.created_s < _YOUNG_S


def _stuck_pod(inputs: ConditionInputs) -> Cause | None:
    for pod in inputs.observed.pods:
        if pod.role is not Role.LEARNER or not pod.terminating:
            continue
        if pod.cause is not None and pod.cause.reason == "NodeLost":
            return pod.cause
        deadline_s = pod.termination_deadline_s
        if deadline_s is not None and inputs.now_s > deadline_s + _OVERDUE_S:
            return lost_node_cause(pod.name, pod.node)
    return None


def _leaving_pod(inputs: ConditionInputs, role: Role) -> Cause | None:
    leaving = (pod for pod in inputs.observed.pods if pod.role is role and pod.terminating)
    return next((pod.cause for pod in leaving if pod.cause is not None), None)


def _control_conditions(inputs: ConditionInputs) -> tuple[Condition, ...]:
    if inputs.decision is None:
        message = "The control loop acts only while the run trains."
        return tuple(
            Condition(type=kind, status="Unknown", reason="NotRunning", message=message)
            for kind in CONTROL_CONDITIONS
        )
    first, *others = inputs.decision.conditions  # `SignalsFresh`
    pods = inputs.observed.pods_of(Role.LEARNER)
    known = inputs.before.condition("LearnerReady")
    ready_s = known.transition_s if known is not None and known.status == "True" else inputs.now_s
    is_ready = any(pod.index == 0 and pod.ready for pod in pods)
    is_starting = not is_ready or inputs.now_s - ready_s < _SETTLING_S
    if first.status == "True" or inputs.silence is None or is_starting:
        return inputs.decision.conditions
    cause = inputs.silence
    return _false(first.type, cause.reason, f"{first.message} {cause.message}."), *others


def _collapsed_conditions(verdict: RunVerdict) -> tuple[Condition, ...]:
    is_collapsed = verdict.phase is LifecyclePhase.COMPLETE and verdict.reason == COLLAPSED
    return (_false("Stable", COLLAPSED, verdict.message),) if is_collapsed else ()


def _revision_conditions(inputs: ConditionInputs) -> tuple[Condition, ...]:
    """Return `UpToDate`; nothing, so that it stays as it was, if nothing was decided."""
    if inputs.verdict.has_ended:
        return (_true("UpToDate", "Ended", "The run has ended: no pod is to be replaced."),)
    if inputs.pending is None:
        return ()
    if inputs.pending:
        return (_false("UpToDate", "RevisionPending", inputs.pending),)
    return (_true("UpToDate", "Current", "The pods are as run and operator say now."),)


def _suspended_condition(inputs: ConditionInputs) -> Condition:
    if inputs.verdict.phase is not LifecyclePhase.SUSPEND:
        return _false("Suspended", "Active", "The run is not suspended.")
    if inputs.observed.pods:
        return _false("Suspended", "SuspendInProgress", "The run's pods are terminating.")
    message = "The run has no pods; set `spec.suspend` to false to resume it."
    return _true("Suspended", "Suspended", message)


def _ready_condition(inputs: ConditionInputs, parts: tuple[Condition, ...]) -> Condition:
    """Return the summary. parts: Conditions that must hold while the run trains."""
    verdict = inputs.verdict
    if verdict.phase is LifecyclePhase.COMPLETE:
        reason = COLLAPSED if verdict.reason == COLLAPSED else "Complete"
        return _true("Ready", reason, verdict.message)
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
        return _false("Ready", reason, f"{message}{_failing_generations(inputs.signals)}")
    if not inputs.has_stepped:
        message = f"The run has not taken a step yet.{_failing_generations(inputs.signals)}"
        return _false("Ready", "Initializing", message)
    return _training(inputs)


def _training(inputs: ConditionInputs) -> Condition:
    """Return `Ready` of a run whose parts are all ready and that has taken a step."""
    signals, policy = inputs.signals, inputs.spec.failure_policy
    known = inputs.before.condition("Ready")
    if inputs.keeps_last_known_signals and known and known.reason in _REASONS_FROM_LEARNER:
        return Condition(
            type=known.type, status=known.status, reason=known.reason, message=known.message
        )
    if signals is not None and signals.failures_in_a_row >= policy.max_failures_in_a_row:
        message = signals.generation_failure or _failing_generations(signals).lstrip()
        return _false("Ready", "GenerationFailing", message)
    if inputs.no_update is not None:
        return _true("Ready", "NoUpdate", inputs.no_update.message)
    if signals is not None and signals.mismatch:
        return _true("Ready", "EnginesDisagree", signals.mismatch)
    if signals is not None and signals.set_aside:
        return _true("Ready", "WorkersSetAside", signals.set_aside)
    return _true("Ready", "Training", "The run trains.")


def _failing_generations(signals: RunSignals | None) -> str:
    """Return how many generations failed, as the end of a message; empty when none did."""
    if signals is None or signals.failures_in_a_row == 0:
        return ""
    latest = signals.generation_failure
    cause = f"; the latest: {latest}" if latest else "; the learner's log has the cause."
    return f" {signals.failures_in_a_row} generations in a row have failed{cause}"


def _end_conditions(verdict: RunVerdict) -> tuple[Condition, Condition]:
    complete = _false("Complete", "NotFinished", "Not all steps are taken.")
    failed = _false("Failed", "NotFailed", "The run has not failed.")
    if verdict.phase is LifecyclePhase.COMPLETE:
        complete = _true("Complete", verdict.reason, verdict.message)
    if verdict.phase is LifecyclePhase.FAILED:
        failed = _true("Failed", verdict.reason, verdict.message)
    return complete, failed


def _true(kind: str, reason: str, message: str) -> Condition:
    return Condition(type=kind, status="True", reason=reason, message=message)


def _false(kind: str, reason: str, message: str) -> Condition:
    return Condition(type=kind, status="False", reason=reason, message=message)
