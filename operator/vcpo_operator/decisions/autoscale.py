"""The autoscale decision: the control loop's decision for a run in a cluster. Pure.

Live replicas are the truth. Whoever changed a Deployment's scale, the loop goes on from there, and
its cool-down starts anew. So a person's or an autoscaler's change is never undone for its own sake,
and an operator that was killed between scaling and writing its status scales once, not twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from vcpo.control import ControlDecision, ControlState, GroupLimits, Limits, decide
from vcpo.spec import VCPORunSpec
from vcpo.spec.cluster import Scaling
from vcpo_operator.observed.records import ObservedState
from vcpo_operator.observed.report import LearnerReport

_UNKNOWNS = {
    "throttle": ("judged_step", "tightened_step"),
    "fleet": ("scaled_step", "starvation"),
}
"""Fields of the control state that may be None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleDecision:
    """A decision and what the next one starts from."""

    decision: ControlDecision
    state: ControlState


def decide_autoscale(
    spec: VCPORunSpec,
    *,
    known: ControlState | None,
    stored: Mapping[str, object],
    observed: ObservedState,
    report: LearnerReport | None,
    now_s: float,
) -> AutoscaleDecision:
    """Decide on admission and replicas.

    known: The state of this process; None just after its start.
    stored: The state as the run's status holds it; empty before the first decision.
    now_s: Unix time, since the state outlives the process.
    """
    live = live_replicas(observed)
    limits = _limits(spec, live)
    state = known or _restored(stored, limits, live, report, now_s)
    state = adopt_live_replicas(state, live, now_s)
    decision, state = decide(limits, state, report.signals if report else None, now_s)
    return AutoscaleDecision(decision=decision, state=state)


def live_replicas(observed: ObservedState) -> dict[str, int]:
    """Replicas of the groups whose Deployment has been released; a paused one is still ours."""
    return {name: each.replicas for name, each in observed.groups.items() if not each.paused}


def adopt_live_replicas(state: ControlState, live: Mapping[str, int], now_s: float) -> ControlState:
    """The state with the live replicas; where they differ somebody scaled, as of now."""
    wanted = state.fleet.replicas
    replicas = {group: live.get(group, wanted[group]) for group in wanted}
    if replicas == dict(wanted):
        return state
    fleet = dataclasses.replace(state.fleet, replicas=replicas, scaled_s=now_s)
    return dataclasses.replace(state, fleet=fleet)


def _limits(spec: VCPORunSpec, live: Mapping[str, int]) -> Limits:
    """The run's limits, with groups that somebody else scales held where they are."""
    limits = Limits.of(spec)
    external = {group.name for group in spec.rollouts if group.scaling is Scaling.EXTERNAL}
    groups = tuple(
        _held(group, live[group.name]) if group.name in external and group.name in live else group
        for group in limits.groups
    )
    return dataclasses.replace(limits, groups=groups)


def _held(group: GroupLimits, replicas: int) -> GroupLimits:
    return GroupLimits(name=group.name, min_replicas=replicas, max_replicas=replicas)


def _restored(
    stored: Mapping[str, object],
    limits: Limits,
    live: Mapping[str, int],
    report: LearnerReport | None,
    now_s: float,
) -> ControlState:
    try:
        return ControlState.from_dict(_complete(stored))
    except ValueError:
        in_force = report.signals.admission_lag_steps if report else None
        return ControlState.start(limits, now_s=now_s, replicas=live, admission_lag_steps=in_force)


def stored_state(state: ControlState) -> dict[str, object]:
    """The state as a status keeps it: without unknowns, which the API server would drop."""
    return {
        part: {name: value for name, value in content.items() if value is not None}
        for part, content in state.to_dict().items()
    }


def _complete(stored: Mapping[str, object]) -> dict[str, object]:
    """The inverse of `stored_state`."""
    return {
        part: {**dict.fromkeys(unknowns), **content}
        for part, unknowns in _UNKNOWNS.items()
        if isinstance(content := stored.get(part), Mapping)
    }
