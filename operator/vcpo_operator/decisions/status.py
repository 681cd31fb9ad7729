"""The next status of a run, with its learner's restarts, and whether to write it. Pure.

Each write sends an event to everybody who watches, the operator included. What people and programs
act on (conditions, decisions, ends) is written at once. Numbers that change all the time are
written every 30 s at most. A status that did not change is not written.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from vcpo.api import VCPORunSpec
from vcpo.control.conditions import Condition
from vcpo.control.decision import ControlDecision, ControlState
from vcpo.control.limits import SIGNALS_MAX_AGE_S
from vcpo.control.run_limits import FailureStreak
from vcpo.control.signals import RunSignals
from vcpo.judgement import Evidence, judgements
from vcpo.service.lifecycle import RANK_LOST
from vcpo_operator.decisions.autoscale import stored_state
from vcpo_operator.decisions.conditions import CONTROL_CONDITIONS, merge_conditions
from vcpo_operator.decisions.lifecycle import RunVerdict
from vcpo_operator.names import Role
from vcpo_operator.observed.pod_causes import redact_and_shorten
from vcpo_operator.observed.records import ObservedPod, ObservedState
from vcpo_operator.observed.status import (
    MAX_MESSAGE_CHARACTERS,
    ContainerEnd,
    CountedPod,
    GroupStatus,
    LastDecision,
    LearnerStatus,
    Numbers,
    RunStatus,
)

PROGRESS_PERIOD_S: Final = 30.0
"""Least time between two writes that change nothing but numbers."""


def with_clocks(
    status: RunStatus,
    spec: VCPORunSpec,
    observed: ObservedState,
    signals: RunSignals | None,
    now_s: float,
) -> RunStatus:
    """Return the status with the times from which deadlines count; a suspended run has none.

    A run is admitted when the learner's pods and, if any worker is wanted, a worker have a node.
    Before the first step a queue may take the admission back.
    """
    if status.completion_s is not None:
        return status
    if spec.suspend:
        return status.but(start_s=None, admission_s=None, first_step_s=None)
    second_s = float(int(now_s))
    start_s = second_s if status.start_s is None else status.start_s
    first_step_s, admission_s = status.first_step_s, status.admission_s
    if first_step_s is None and signals is not None and signals.step > 0:
        first_step_s = second_s
    wanted = {Role.LEARNER: spec.learner.replicas}
    if any(group.min_replicas > 0 for group in spec.rollouts):
        wanted[Role.ROLLOUT] = 1
    is_placed = all(
        sum(pod.node is not None for pod in observed.pods_of(role)) >= number
        for role, number in wanted.items()
    )
    if first_step_s is None and any(pod.is_gated for pod in observed.pods_of(Role.LEARNER)):
        admission_s = None
    elif admission_s is None and (first_step_s is not None or is_placed):
        admission_s = second_s if first_step_s is None else first_step_s
    return status.but(start_s=start_s, admission_s=admission_s, first_step_s=first_step_s)


def as_new_attempt(status: RunStatus) -> RunStatus:
    """Return the status of a failed run that starts again; it keeps how the learner ended."""
    return status.but(
        conditions=tuple(each for each in status.conditions if each.type != "Failed"),
        start_s=None,
        admission_s=None,
        first_step_s=None,
        completion_s=None,
        drain_s=None,
        learner=status.learner.but(failures=0),
    )


def with_end(status: RunStatus, verdict: RunVerdict, now_s: float) -> RunStatus:
    """Return the status with the time at which the run ended, if it has."""
    if not verdict.has_ended or status.completion_s is not None:
        return status
    return status.but(completion_s=float(int(now_s)))


def with_signals(status: RunStatus, spec: VCPORunSpec, signals: RunSignals | None) -> RunStatus:
    """Return the status with the learner's numbers; without signals they do not change."""
    if signals is None:
        return status
    is_old = signals.age_s > SIGNALS_MAX_AGE_S
    phase = "silent" if is_old else signals.phase.value
    told = judgements(Evidence(spec=spec, signals=signals, phase=phase))[0]
    text = redact_and_shorten(str(told), MAX_MESSAGE_CHARACTERS)
    return status.but(verdict=text, **dict(Numbers.of(signals)))


def with_groups(
    status: RunStatus,
    spec: VCPORunSpec,
    observed: ObservedState,
    *,
    desired: Mapping[str, int],
    now_s: float,
) -> RunStatus:
    """Return the status with the workers of each group of the spec."""
    before = {group.name: group for group in status.groups}
    groups = []
    for name in (group.name for group in spec.rollouts):
        existing, known = observed.groups.get(name), before.get(name)
        wanted = desired.get(name, 0)
        scaled_s = None if known is None else known.scaled_s
        if known is not None and known.desired != wanted:
            scaled_s = float(int(now_s))
        groups.append(
            GroupStatus(
                name=name,
                desired=wanted,
                replicas=existing.replicas if existing else 0,
                ready=existing.ready if existing else 0,
                scaled_s=scaled_s,
            )
        )
    return status.but(groups=tuple(groups))


def with_learner_pods(status: RunStatus, spec: VCPORunSpec, observed: ObservedState) -> RunStatus:
    """Return the status with the pods of the learner, ready and desired."""
    ready = sum(pod.ready for pod in observed.pods_of(Role.LEARNER))
    pods = f"{ready}/{spec.learner.replicas}"
    return status.but(learner=status.learner.but(pods=pods))


def with_decision(
    status: RunStatus, decision: ControlDecision | None, state: ControlState | None
) -> RunStatus:
    """Return the status with the control loop's limits, and its state for the next operator."""
    if decision is None or state is None:
        return status
    change = decision.last_lag_change
    return status.but(
        lag_limit_steps=decision.lag_limit_steps,
        last_decision=status.last_decision if change is None else LastDecision.of(change),
        control=stored_state(state),
    )


def with_conditions(
    status: RunStatus, states: tuple[Condition, ...], *, generation: int, now_s: float
) -> RunStatus:
    """Return the status with its conditions, judged against a generation of the spec."""
    conditions = merge_conditions(states, status, generation=generation, now_s=now_s)
    return status.but(conditions=conditions, observed_generation=generation)


def needs_write(before: RunStatus, after: RunStatus, now_s: float) -> bool:
    """Whether the new status is written now."""
    if _actionable_part(before) != _actionable_part(after):
        return True
    if before.but(updated_s=None).to_dict() == after.but(updated_s=None).to_dict():
        return False
    return before.updated_s is None or now_s - before.updated_s >= PROGRESS_PERIOD_S


def _actionable_part(status: RunStatus) -> tuple[object, ...]:
    """Return the part on which people and programs act.

    The reasons of the control loop's conditions are left out: they may change with every poll.
    Those of `Stable` do not, and tell a run that is in danger from one that is dead.
    """
    volatile = set(CONTROL_CONDITIONS) - {"Stable"}
    conditions = [
        (each.type, each.status, "" if each.type in volatile else each.reason)
        for each in status.conditions
    ]
    return (
        status.observed_generation,
        conditions,
        (status.start_s, status.admission_s, status.first_step_s),
        (status.completion_s, status.drain_s),
        status.learner.but(pods="", last_end=None),
        status.lag_limit_steps,
        [(group.name, group.desired) for group in status.groups],
    )


def with_restarts(status: RunStatus, observed: ObservedState, *, num_pods: int) -> RunStatus:
    """Return the status with the learner's restarts counted, and how it ended last.

    ```
    pods start --> all are there, rank 0 answers: they are a group
                          |
                          v  a container of the group ends, or a pod of it goes
                   every pod of the group is deleted; the StatefulSet creates all of them anew
    ```
    Ranks that have lost one cannot continue, and may wait for it until their timeout. A pod that
    starts alone could meet the old ranks. So the pods of a group end together, and start again from
    the last checkpoint. A learner of one pod needs none of this: its container restarts by itself.
    """
    pods = observed.pods_of(Role.LEARNER)
    if not pods and num_pods == 1:
        return status
    learner = with_pods(status.learner, pods, num_pods=num_pods, step=status.step or 0)
    return status.but(learner=learner)


def with_pods(
    learner: LearnerStatus, pods: Sequence[ObservedPod], *, num_pods: int, step: int
) -> LearnerStatus:
    """Return the record with the restarts of the learner's pods up to now.

    step: The last known optimizer step; progress is a step beyond the furthest one before.
    """
    fresh = _new_restarts(learner, pods)
    num_restarts = max(fresh.values(), default=0)
    streak = FailureStreak(failures=learner.failures, progress=learner.furthest_step)
    for _ in range(num_restarts):
        streak = streak.after_failure(step)
    is_broken = any(uid not in fresh or fresh[uid] for uid in learner.group)
    going = learner.group if is_broken else learner.replaced
    replaced = tuple(uid for uid in going if uid in fresh)
    group = () if is_broken else learner.group
    if not (is_broken or group or replaced) and num_pods > 1:
        group = _uids_that_met(pods, num_pods)
    if num_pods == 1:  # a message may come later than the restart
        ends = [pod.last_end for pod in pods if pod.last_end is not None]
    else:
        ends = [pod.last_end for pod in pods if fresh[pod.uid] and pod.last_end is not None]
    return learner.but(
        restarts=learner.restarts + num_restarts,
        counted=tuple(CountedPod(uid=pod.uid, restarts=pod.restarts) for pod in pods),
        group=group,
        replaced=replaced,
        failures=streak.failures,
        furthest_step=streak.progress,
        last_end=min(ends, key=_rank, default=learner.last_end),
    )


def _new_restarts(learner: LearnerStatus, pods: Sequence[ObservedPod]) -> dict[str, int]:
    known = {each.uid: each.restarts for each in learner.counted}
    new = {pod.uid: max(0, pod.restarts - known.get(pod.uid, 0)) for pod in pods}
    # A pod that is deleted with its group may lose its ranks before it goes.
    return {uid: 0 if uid in learner.replaced else count for uid, count in new.items()}


def _uids_that_met(pods: Sequence[ObservedPod], num_pods: int) -> tuple[str, ...]:
    is_led = any(pod.index == 0 and pod.ready for pod in pods)
    return tuple(pod.uid for pod in pods) if is_led and len(pods) == num_pods else ()


def _rank(end: ContainerEnd) -> tuple[bool, float, str]:
    return end.exit_code == RANK_LOST, end.end_s or 0.0, end.pod
