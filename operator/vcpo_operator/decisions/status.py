"""The next status of a run, and whether to write it. Pure.

Each write sends an event to everybody who watches, the operator included. What people and programs
act on (conditions, decisions, ends) is written at once. Numbers that change all the time are
written every 30 s at most. A status that did not change is not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vcpo.api import VCPORunSpec
from vcpo.control.decision import ControlDecision
from vcpo.control.limits import SIGNALS_MAX_AGE_S
from vcpo.control.signals import RunSignals
from vcpo.control.state import ControlState
from vcpo.judgement import Evidence, judgements
from vcpo_operator.decisions.autoscale import stored_state
from vcpo_operator.decisions.conditions import CONTROL_CONDITIONS, ConditionState, merge_conditions
from vcpo_operator.decisions.lifecycle import RunVerdict
from vcpo_operator.names import Role
from vcpo_operator.observed.pod_causes import redact_and_shorten
from vcpo_operator.observed.records import ObservedState
from vcpo_operator.observed.status import (
    MAX_MESSAGE_CHARACTERS,
    GroupStatus,
    LastDecision,
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
    status: RunStatus, states: tuple[ConditionState, ...], *, generation: int, now_s: float
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
