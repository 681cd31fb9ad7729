"""The next status of a run, and whether it is worth a write. Pure.

A write costs an event for everybody who watches, the operator included. What people and programs
act on (conditions, decisions, ends) is written at once; numbers that move all the time are written
every 30 s at most; a status that says the same is not written at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from vcpo.control import ControlDecision, ControlState
from vcpo.spec import VCPORunSpec
from vcpo_operator.decisions.autoscale import stored_state
from vcpo_operator.decisions.conditions import CONTROL_CONDITIONS, ConditionState, merge_conditions
from vcpo_operator.decisions.lifecycle import LifecyclePhase, RunVerdict
from vcpo_operator.decisions.status_model import GroupStatus, Progress, RunStatus, StatusCondition
from vcpo_operator.names import Role
from vcpo_operator.observed.records import ObservedState
from vcpo_operator.observed.report import LearnerReport

PROGRESS_PERIOD_S: Final = 30.0
"""Least time between two writes that bring nothing but numbers."""


def with_clocks(
    status: RunStatus,
    spec: VCPORunSpec,
    observed: ObservedState,
    report: LearnerReport | None,
    now_s: float,
) -> RunStatus:
    """The status with the clocks of the deadlines, which stop at a rest.

    The run waits from its start until it is admitted, that is until the learner and, where some are
    to be, a worker have a node. Before its first step a queue may take the admission back.
    """
    if status.completion_s is not None:
        return status
    if spec.suspend:
        return replace(status, start_s=None, admission_s=None, first_step_s=None)
    second_s = float(int(now_s))
    start_s = second_s if status.start_s is None else status.start_s
    first_step_s, admission_s = status.first_step_s, status.admission_s
    if first_step_s is None and report is not None and report.signals.step > 0:
        first_step_s = second_s
    if first_step_s is None and any(pod.is_gated for pod in observed.pods_of(Role.LEARNER)):
        admission_s = None
    elif admission_s is None and (first_step_s is not None or _is_placed(spec, observed)):
        admission_s = second_s if first_step_s is None else first_step_s
    return replace(status, start_s=start_s, admission_s=admission_s, first_step_s=first_step_s)


def _is_placed(spec: VCPORunSpec, observed: ObservedState) -> bool:
    """Whether the learner and, where some are to be, a worker have a node."""
    roles = [Role.LEARNER]
    if any(group.min_replicas > 0 for group in spec.rollouts):
        roles.append(Role.ROLLOUT)
    return all(any(pod.node is not None for pod in observed.pods_of(role)) for role in roles)


def as_new_attempt(status: RunStatus) -> RunStatus:
    """The status of a failed run as it starts anew; how its learner ended stays."""
    return replace(
        status,
        conditions=tuple(each for each in status.conditions if each.type != "Failed"),
        start_s=None,
        admission_s=None,
        first_step_s=None,
        completion_s=None,
        drain_s=None,
        restarts=replace(status.restarts, streak=replace(status.restarts.streak, failures=0)),
    )


def with_end(status: RunStatus, verdict: RunVerdict, now_s: float) -> RunStatus:
    """The status with the time of the end, once there is one."""
    if not verdict.has_ended or status.completion_s is not None:
        return status
    return replace(status, completion_s=float(int(now_s)))


def with_report(status: RunStatus, report: LearnerReport | None) -> RunStatus:
    """The status with the learner's numbers; without a report they stay what they were."""
    if report is None:
        return status
    signals = report.signals
    progress = Progress(
        step=signals.step,
        policy_version=signals.policy_version,
        ess_ratio=report.ess_ratio,
        learning_rate_scale=report.learning_rate_scale,
        accuracy=report.accuracy,
        lag_p50=signals.lag_p50,
        lag_max=signals.lag_max,
    )
    return replace(status, progress=progress)


def with_groups(
    status: RunStatus,
    spec: VCPORunSpec,
    observed: ObservedState,
    verdict: RunVerdict,
    desired: Mapping[str, int],
    now_s: float,
) -> RunStatus:
    """The status with the number of workers of each group of the spec."""
    running = verdict.phase is LifecyclePhase.RUN
    before = {group.name: group for group in status.groups}
    groups = []
    for group in spec.rollouts:
        there = observed.groups.get(group.name)
        wanted = desired.get(group.name, 0) if running else 0
        known = before.get(group.name)
        scaled_s = None if known is None else known.scaled_s
        if known is not None and known.desired != wanted:
            scaled_s = float(int(now_s))
        groups.append(
            GroupStatus(
                name=group.name,
                desired=wanted,
                replicas=there.replicas if there else 0,
                ready=there.ready if there else 0,
                scaled_s=scaled_s,
            )
        )
    return replace(status, groups=tuple(groups))


def with_decision(
    status: RunStatus, decision: ControlDecision | None, state: ControlState | None
) -> RunStatus:
    """The status with the control loop's limits, and its state for the next operator."""
    if decision is None or state is None:
        return status
    return replace(
        status, admission_lag_steps=decision.admission_lag_steps, control=stored_state(state)
    )


def with_conditions(
    status: RunStatus, found: tuple[ConditionState, ...], *, generation: int, now_s: float
) -> RunStatus:
    """The status with its conditions, judged against a generation of the spec."""
    conditions = merge_conditions(found, status, generation=generation, now_s=now_s)
    return replace(status, conditions=conditions, observed_generation=generation)


def with_update_time(status: RunStatus, now_s: float) -> RunStatus:
    """The status with the time at which it is written."""
    return replace(status, updated_s=float(int(now_s)))


def needs_write(before: RunStatus, after: RunStatus, now_s: float) -> bool:
    """Whether the new status is to be written now."""
    if _spoken(before) != _spoken(after):
        return True
    same = replace(before, updated_s=None).to_dict() == replace(after, updated_s=None).to_dict()
    if same:
        return False
    return before.updated_s is None or now_s - before.updated_s >= PROGRESS_PERIOD_S


def _spoken(status: RunStatus) -> tuple[object, ...]:
    """The part of a status that somebody may act on."""
    return (
        status.observed_generation,
        [(each.type, each.status, _steady_reason(each)) for each in status.conditions],
        (status.start_s, status.admission_s, status.first_step_s),
        (status.completion_s, status.drain_s),
        status.restarts,
        status.admission_lag_steps,
        [(group.name, group.desired) for group in status.groups],
    )


def _steady_reason(condition: StatusCondition) -> str:
    """The reason, unless it may turn with every poll of the learner."""
    return "" if condition.type in CONTROL_CONDITIONS else condition.reason
