"""The control decision: from signals and the last state to limits and the next state.

    spec ------.
    state  ----+--> decide --> ControlDecision (lag limit, replicas, conditions), next state
    signals ---'
    now_s -----'

Nothing here reads a clock, calls a service or keeps state: the caller keeps the state and applies
the decision. The same inputs give the same outputs, so a recorded run can be replayed. If signals
are missing, old or invalid, the last limits stay in force (fail static).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.api import VCPORunSpec
from vcpo.control.conditions import Condition, ConditionType, Reason, condition
from vcpo.control.limits import (
    SIGNALS_MAX_AGE_S,
    ChangeKind,
    LimitChange,
    fit_replicas,
    lag_change,
    warning_reason,
)
from vcpo.control.scaling import Direction, FleetState, ScalingContext, next_fleet
from vcpo.control.signals import RunSignals
from vcpo.control.throttle import (
    EssHealth,
    ThrottleState,
    ess_health,
    follow_learner,
    next_throttle,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """The part of a decision's input that earlier decisions determine."""

    throttle: ThrottleState
    fleet: FleetState
    last_lag_change: LimitChange | None = None
    """The newest change of the lag limit, which explains the limit in force."""

    @classmethod
    def start(
        cls,
        spec: VCPORunSpec,
        *,
        now_s: float,
        replicas: Mapping[str, int] | None = None,
        lag_limit_steps: int | None = None,
    ) -> Self:
        """Return the state before the first decision.

        now_s: time on the clock of the decisions; the cool-downs start now.
        replicas: existing workers by rollout group; None starts each group at its minimum.
        lag_limit_steps: lag limit in force; None starts at `algorithm.maxPolicyLagSteps`.
        """
        most = spec.algorithm.max_policy_lag_steps
        lag = most if lag_limit_steps is None else min(lag_limit_steps, most)
        return cls(
            throttle=ThrottleState(lag_limit_steps=lag),
            fleet=FleetState(replicas=fit_replicas(spec.rollouts, replicas or {}), scaled_s=now_s),
        )

    def fit(self, spec: VCPORunSpec, now_s: float) -> ControlState:
        """Return this state within the spec's bounds; no time in it is later than `now_s`."""
        starvation = self.fleet.starvation
        if starvation is not None:
            seen_s = min(starvation.seen_s, now_s)
            starvation = dataclasses.replace(starvation, seen_s=seen_s)
        fleet = dataclasses.replace(
            self.fleet,
            replicas=fit_replicas(spec.rollouts, self.fleet.replicas),
            scaled_s=min(self.fleet.scaled_s, now_s),
            starvation=starvation,
        )
        throttle = self.throttle.clamp(spec.algorithm.max_policy_lag_steps)
        return dataclasses.replace(self, throttle=throttle, fleet=fleet)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlDecision:
    """The limits to apply now, with the conditions and changes to report."""

    lag_limit_steps: int
    """Lag limit for new work, in policy versions, in [0, maxPolicyLagSteps]."""
    replicas: Mapping[str, int]
    """Desired number of workers by rollout group, within the group's bounds."""
    direction: Direction
    """Whether this decision adds workers, removes workers, or does neither."""
    conditions: tuple[Condition, ...]
    """`SignalsFresh`, `EssHealthy`, `LearnerFed`, `Stable`, in this order."""
    changes: tuple[LimitChange, ...]
    """One for each limit that this decision changes; empty if it changes none."""
    last_lag_change: LimitChange | None = None
    """The newest change of the lag limit, of this decision or an earlier one; None before it."""

    @property
    def lag_reason(self) -> str:
        return "" if self.last_lag_change is None else self.last_lag_change.reason

    def condition(self, kind: ConditionType) -> Condition:
        return next(each for each in self.conditions if each.type is kind)


def decide(
    spec: VCPORunSpec, state: ControlState, signals: RunSignals | None, now_s: float
) -> tuple[ControlDecision, ControlState]:
    """Decide on the lag limit and on the replicas.

    state: from the last decision, or from `ControlState.start`. It is first fitted to the spec,
        which may have changed.
    signals: None if there are none.
    now_s: seconds on a clock that runs as long as the state is kept: Unix time if the state
        outlives the process. If the clock is set back, the cool-downs start again.
    Returns the decision and the state for the next call.
    """
    state = state.fit(spec, now_s)
    if signals is None:
        return _hold(state, Reason.MISSING), state
    if signals.age_s > SIGNALS_MAX_AGE_S:
        return _hold(state, Reason.STALE), state
    return _decide_on(spec, state, signals, now_s)


def _decide_on(
    spec: VCPORunSpec, state: ControlState, signals: RunSignals, now_s: float
) -> tuple[ControlDecision, ControlState]:
    health = ess_health(spec.control.ess_floor_ratio, signals)
    level = signals.warning_level or WarningLevel.OK
    warning = level if spec.health.guards.answers(level) else None
    throttle = next_throttle(
        state.throttle,
        health=health,
        is_warned=warning is not None,
        step=signals.step,
        max_policy_lag_steps=spec.algorithm.max_policy_lag_steps,
    )
    throttle = follow_learner(
        throttle, state.throttle, learner_limit_steps=signals.lag_limit_steps, step=signals.step
    )
    context = ScalingContext(
        lag_limit_steps=throttle.lag_limit_steps,
        ess_has_room=health is EssHealth.HEALTHY,
        now_s=now_s,
    )
    fleet, fed = next_fleet(spec, state.fleet, signals, context)
    lag_changes = _lag_changes(state.throttle, throttle, signals, warning, now_s)
    decided = ControlState(
        throttle=throttle,
        fleet=fleet,
        last_lag_change=lag_changes[0] if lag_changes else state.last_lag_change,
    )
    tightened = throttle.lag_limit_steps < spec.algorithm.max_policy_lag_steps
    conditions = (
        condition(ConditionType.SIGNALS_FRESH, Reason.FRESH),
        condition(ConditionType.ESS_HEALTHY, _ess_reason(health, tightened=tightened)),
        condition(ConditionType.LEARNER_FED, fed),
        condition(ConditionType.STABLE, _stable_reason(signals)),
    )
    changes = (*lag_changes, *_scaling_changes(state.fleet, fleet, signals, now_s))
    directions = {Reason.SCALING_UP: Direction.UP, Reason.SCALING_DOWN: Direction.DOWN}
    direction = directions.get(fed, Direction.HOLD)
    return _decision(decided, direction, conditions, changes), decided


def _hold(state: ControlState, why: Reason) -> ControlDecision:
    conditions = (
        condition(ConditionType.SIGNALS_FRESH, why),
        condition(ConditionType.ESS_HEALTHY, Reason.NO_SIGNALS),
        condition(ConditionType.LEARNER_FED, Reason.NO_SIGNALS),
        condition(ConditionType.STABLE, Reason.NO_SIGNALS),
    )
    return _decision(state, Direction.HOLD, conditions, ())


def _decision(
    state: ControlState,
    direction: Direction,
    conditions: tuple[Condition, ...],
    changes: tuple[LimitChange, ...],
) -> ControlDecision:
    return ControlDecision(
        lag_limit_steps=state.throttle.lag_limit_steps,
        replicas=dict(state.fleet.replicas),
        direction=direction,
        conditions=conditions,
        changes=changes,
        last_lag_change=state.last_lag_change,
    )


def _ess_reason(health: EssHealth, *, tightened: bool) -> Reason:
    known = {EssHealth.UNKNOWN: Reason.NO_STEP_YET, EssHealth.BELOW_FLOOR: Reason.BELOW_FLOOR}
    return known.get(health, Reason.RECOVERING if tightened else Reason.ABOVE_FLOOR)


def _stable_reason(signals: RunSignals) -> Reason:
    level = signals.warning_level
    if signals.rollback and level in {WarningLevel.OK, WarningLevel.WARN}:
        return Reason.ROLLED_BACK
    return Reason.NO_STEP_YET if level is None else Reason(level.capitalize())


def _lag_changes(
    before: ThrottleState,
    after: ThrottleState,
    signals: RunSignals,
    warning: WarningLevel | None,
    now_s: float,
) -> tuple[LimitChange, ...]:
    old, new = before.lag_limit_steps, after.lag_limit_steps
    if old == new:
        return ()
    reason = _lag_reason(old, new, signals, warning)
    return (lag_change(before=old, after=new, reason=reason, decided_s=now_s),)


def _lag_reason(old: int, new: int, signals: RunSignals, warning: WarningLevel | None) -> str:
    """Return why the limit changes; warning: its level if it throttles the run, else None."""
    if new < old and warning is not None and signals.last is not None:
        return warning_reason(warning, signals.last.warning_score, signals.step)
    if new < old and new == signals.lag_limit_steps:
        return signals.rollback or (
            "the learner already holds this limit, after an early warning or a restart"
        )
    share = signals.relative_ess_ratio_mean or 0.0
    return f"the ESS ratio is {share:.1%} of the on-policy ratio"


def _scaling_changes(
    before: FleetState, after: FleetState, signals: RunSignals, now_s: float
) -> tuple[LimitChange, ...]:
    reason = (
        f"the learner waited {signals.learner_idle_ratio:.1%} of the time"
        f" at {signals.consumed_per_s:.3g} trajectories/s"
    )
    return tuple(
        LimitChange(
            kind=ChangeKind.SCALED,
            group=group,
            before=before.replicas[group],
            after=replicas,
            reason=reason,
            decided_s=now_s,
        )
        for group, replicas in after.replicas.items()
        if replicas != before.replicas[group]
    )
