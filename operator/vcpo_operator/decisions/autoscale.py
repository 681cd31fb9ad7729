"""The control decision of a run in a cluster: admission and replicas. Pure.

The live replicas are the truth. If somebody else changed a Deployment's scale, the control loop
starts from that number and its cool-down restarts. So the loop never undoes a person's or an
autoscaler's change for its own sake. And an operator that was killed between scaling and writing
the status scales once, not twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from vcpo.api import VCPORunSpec
from vcpo.api.cluster import Scaling
from vcpo.control.decision import ControlDecision, decide
from vcpo.control.limits import ControlLimits, GroupLimits
from vcpo.control.signals import RunSignals
from vcpo.control.state import ControlState
from vcpo_operator.decisions.overdue import most_workers
from vcpo_operator.observed.records import ObservedState

_OPTIONAL_FIELDS = {
    "throttle": ("judged_step", "tightened_step"),
    "fleet": ("scaled_step", "starvation"),
    "last_lag_change": (),
}
"""Fields of the control state that may be None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleDecision:
    """A control decision and the state that the next one starts from."""

    decision: ControlDecision
    state: ControlState


def decide_autoscale(
    spec: VCPORunSpec,
    *,
    known: ControlState | None,
    stored: Mapping[str, object],
    observed: ObservedState,
    signals: RunSignals | None,
    now_s: float,
) -> AutoscaleDecision:
    """Decide on admission and replicas.

    known: The state of this process; None just after its start.
    stored: The state as the run's status holds it; empty before the first decision.
    now_s: Unix time, since the state outlives the process.
    """
    live = live_replicas(observed)
    limits = _limits(spec, live)
    state = known or _restore_state(stored, limits, live, signals, now_s)
    state = adopt_live_replicas(state, live, now_s)
    decision, state = decide(limits, state, signals, now_s)
    most = most_workers(spec, observed, now_s)
    replicas = {
        group: min(wanted, most.get(group, wanted)) for group, wanted in decision.replicas.items()
    }
    decision = dataclasses.replace(decision, replicas=replicas)
    return AutoscaleDecision(decision=decision, state=state)


def live_replicas(observed: ObservedState) -> dict[str, int]:
    """Return the replicas of each group, except groups whose new Deployment is still paused."""
    return {name: each.replicas for name, each in observed.groups.items() if not each.paused}


def adopt_live_replicas(state: ControlState, live: Mapping[str, int], now_s: float) -> ControlState:
    """Return the state with the live replicas; a difference counts as scaled at `now_s`."""
    wanted = state.fleet.replicas
    replicas = {group: live.get(group, wanted[group]) for group in wanted}
    if replicas == dict(wanted):
        return state
    fleet = dataclasses.replace(state.fleet, replicas=replicas, scaled_s=now_s)
    return dataclasses.replace(state, fleet=fleet)


def stored_state(state: ControlState) -> dict[str, object]:
    """Return the state as a status holds it: without None, which the API server would drop."""
    return {
        part: {name: value for name, value in content.items() if value is not None}
        for part, content in state.to_dict().items()
        if content is not None
    }


def _limits(spec: VCPORunSpec, live: Mapping[str, int]) -> ControlLimits:
    """Return the run's limits; groups with another scaler are fixed at their live replicas."""
    limits = ControlLimits.of(spec)
    external = {group.name for group in spec.rollouts if group.scaling is Scaling.EXTERNAL}
    fixed = {
        name: GroupLimits(name=name, min_replicas=replicas, max_replicas=replicas)
        for name, replicas in live.items()
        if name in external
    }
    groups = tuple(fixed.get(group.name, group) for group in limits.groups)
    return dataclasses.replace(limits, groups=groups)


def _restore_state(
    stored: Mapping[str, object],
    limits: ControlLimits,
    live: Mapping[str, int],
    signals: RunSignals | None,
    now_s: float,
) -> ControlState:
    """Read the stored state; start a new one from the live limits if it cannot be read."""
    complete = {
        part: {**dict.fromkeys(optional), **content}
        for part, optional in _OPTIONAL_FIELDS.items()
        if isinstance(content := stored.get(part), Mapping)
    }
    try:
        return ControlState.from_dict(complete)
    except ValueError:
        in_force = signals.lag_limit_steps if signals else None
        return ControlState.start(limits, now_s=now_s, replicas=live, lag_limit_steps=in_force)
