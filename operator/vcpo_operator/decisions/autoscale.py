"""The control decision of a run in a cluster: admission and replicas. Pure.

The live replicas are the truth. If somebody else changed a Deployment's scale, the control loop
starts from that number and its cool-down restarts. So the loop never undoes a person's change for
its own sake. And an operator that was killed between scaling and writing the status scales once,
not twice.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter

from vcpo.api import VCPORunSpec
from vcpo.control.decision import ControlDecision, ControlState, decide
from vcpo.control.signals import RunSignals
from vcpo_operator.observed.records import ObservedState

_STATE: Final = TypeAdapter(ControlState)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleDecision:
    """A control decision and the state that the next one starts from."""

    decision: ControlDecision
    state: ControlState


def decide_autoscale(
    spec: VCPORunSpec,
    *,
    known: ControlState | None,
    stored: Mapping[str, Any],
    observed: ObservedState,
    signals: RunSignals | None,
    now_s: float,
) -> AutoscaleDecision:
    """Decide on admission and replicas.

    known: The state of this process; None just after its start.
    stored: The state as the run's status holds it; empty before the first decision.
    now_s: Unix time, since the state outlives the process.
    """
    live = {name: each.replicas for name, each in observed.groups.items()}
    state = known or _restore_state(stored, spec, live, signals, now_s)
    decision, state = decide(spec, adopt_live_replicas(state, live, now_s), signals, now_s)
    return AutoscaleDecision(decision=decision, state=state)


def adopt_live_replicas(state: ControlState, live: Mapping[str, int], now_s: float) -> ControlState:
    """Return the state with the live replicas; a difference counts as scaled at `now_s`."""
    wanted = state.fleet.replicas
    replicas = {group: live.get(group, wanted[group]) for group in wanted}
    if replicas == dict(wanted):
        return state
    fleet = dataclasses.replace(state.fleet, replicas=replicas, scaled_s=now_s)
    return dataclasses.replace(state, fleet=fleet)


def stored_state(state: ControlState) -> dict[str, Any]:
    """Return the state as a status holds it: without None, which the API server would drop."""
    document: dict[str, Any] = _STATE.dump_python(state, mode="json", exclude_none=True)
    return document


def _restore_state(
    stored: Mapping[str, Any],
    spec: VCPORunSpec,
    live: Mapping[str, int],
    signals: RunSignals | None,
    now_s: float,
) -> ControlState:
    """Read the stored state; start a new one from the live limits if it cannot be read."""
    try:
        return _STATE.validate_python(stored)
    except ValueError:
        in_force = signals.lag_limit_steps if signals else None
        return ControlState.start(spec, now_s=now_s, replicas=live, lag_limit_steps=in_force)
