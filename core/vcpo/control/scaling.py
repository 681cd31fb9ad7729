"""Scaling: the number of rollout workers follows the share of time in which the learner waits.

    the learner waits more than STARVED_IDLE_RATIO     starved: add workers, if they can help
    the learner waits less than SATURATED_IDLE_RATIO, and
    all work that the lag limit admits is leased       saturated: remove workers
    otherwise                                          balanced: no change

More workers help only while admissible work is left, the median lag is low enough and the ESS is
healthy. docs/inside/mathematics.md has the reasons.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from vcpo.api import VCPORunSpec
from vcpo.control.conditions import Reason
from vcpo.control.limits import SATURATED_IDLE_RATIO, STARVED_IDLE_RATIO
from vcpo.control.signals import RunSignals

ADMISSION_FULL_RATIO = 0.9
"""Share of the admissible work; if more of it is outstanding, all work counts as leased."""

LAG_ROOM_RATIO = 0.75
"""Share of the lag limit; workers are added only while the median lag is within it."""

LARGEST_GROWTH = 2.0
"""Largest factor by which the replicas of a group grow at a time."""

REMOVAL_DIVISOR = 4
"""Divisor of a group's replicas that gives the most workers removed at a time; one may always
go."""

STARVATION_MEMORY_COOLDOWNS = 10
"""Number of scale-down cool-downs for which a starving number of workers is remembered. After that
time a removal may starve the learner again for as long as a worker takes to start."""

# 31 / 0.62 is 50 workers, and 31 * (1 / (1 - 0.38)) is 50.00000000000001 in floats.
_ROUNDING_SLACK = 1e-9


class Direction(StrEnum):
    """Direction in which a decision changes the number of workers."""

    UP = "up"
    DOWN = "down"
    HOLD = "hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Starvation:
    """The learner starved with this number of ready workers."""

    workers: int
    seen_s: float
    """Time at which it was last observed, on the clock of the decisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """The desired replicas and the history that determines the next ones."""

    replicas: Mapping[str, int]
    scaled_s: float
    """Time of the last change, or of the start, on the clock of the decisions."""
    scaled_step: int | None = None
    """The learner's step at the last change; None if there was none."""
    starvation: Starvation | None = None
    """Number of workers that a removal may not return to; None if the learner never starved."""

    @property
    def total(self) -> int:
        return sum(self.replicas.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingContext:
    """Inputs of a scaling decision besides limits, signals and state."""

    lag_limit_steps: int
    """Lag limit just decided for new work, in policy versions."""
    ess_has_room: bool
    """Whether the ESS is healthy enough for more off-policy data."""
    now_s: float


def next_fleet(
    spec: VCPORunSpec, fleet: FleetState, signals: RunSignals, context: ScalingContext
) -> tuple[FleetState, Reason]:
    """Return the next desired replicas and the reason of the condition `LearnerFed`.

    fleet: its replicas are within the groups' bounds.
    """
    fleet = replace(fleet, starvation=_latest_starvation(spec, fleet, signals, context))
    reason = _judge(spec, fleet, signals, context)
    if reason is Reason.SCALING_UP:
        replicas = _add_workers(spec, fleet, _desired_workers(fleet, signals) - fleet.total)
    elif reason is Reason.SCALING_DOWN:
        spare = fleet.total - _least_workers(spec, fleet, context)
        replicas = _remove_workers(spec, fleet, spare)
    else:
        return fleet, reason
    changed = replace(fleet, replicas=replicas, scaled_s=context.now_s, scaled_step=signals.step)
    return changed, reason


def _judge(
    spec: VCPORunSpec, fleet: FleetState, signals: RunSignals, context: ScalingContext
) -> Reason:
    if signals.relative_ess_ratio_mean is None:
        return Reason.NO_STEP_YET
    if signals.learner_idle_ratio > STARVED_IDLE_RATIO:
        return _judge_starved(spec, fleet, signals, context)
    if signals.learner_idle_ratio < SATURATED_IDLE_RATIO and _is_all_leased(signals, context):
        return _judge_saturated(spec, fleet, signals, context)
    return Reason.BALANCED


def _judge_starved(
    spec: VCPORunSpec, fleet: FleetState, signals: RunSignals, context: ScalingContext
) -> Reason:
    if _is_all_leased(signals, context):
        return Reason.ADMISSION_BOUND
    if not context.ess_has_room:
        return Reason.ESS_LOW
    if not _has_lag_room(signals, context.lag_limit_steps):
        return Reason.LAG_HIGH
    if fleet.total >= sum(group.max_replicas for group in spec.rollouts):
        return Reason.AT_MAXIMUM
    if _desired_workers(fleet, signals) <= fleet.total:
        return Reason.WORKERS_PENDING
    if not _has_settled(fleet, signals, context, spec.control.scale_up_cooldown_seconds):
        return Reason.COOLING_DOWN
    return Reason.SCALING_UP


def _judge_saturated(
    spec: VCPORunSpec, fleet: FleetState, signals: RunSignals, context: ScalingContext
) -> Reason:
    if fleet.total <= _least_workers(spec, fleet, context):
        return Reason.AT_MINIMUM
    if not _has_settled(fleet, signals, context, spec.control.scale_down_cooldown_seconds):
        return Reason.SATURATED
    return Reason.SCALING_DOWN


def _is_all_leased(signals: RunSignals, context: ScalingContext) -> bool:
    admitted = (context.lag_limit_steps + 1) * signals.batch_trajectories
    return signals.outstanding >= ADMISSION_FULL_RATIO * admitted


def _has_lag_room(signals: RunSignals, lag_limit_steps: int) -> bool:
    last = signals.last
    if last is None:
        return True
    room = math.ceil(LAG_ROOM_RATIO * lag_limit_steps)
    return last.lag_max <= lag_limit_steps and last.lag_p50 <= room


def _has_settled(
    fleet: FleetState, signals: RunSignals, context: ScalingContext, cooldown_s: float
) -> bool:
    return signals.step != fleet.scaled_step and context.now_s - fleet.scaled_s >= cooldown_s


def _num_ready(fleet: FleetState, signals: RunSignals) -> int:
    return min(fleet.total, sum(signals.ready_workers.values()))


def _desired_workers(fleet: FleetState, signals: RunSignals) -> int:
    busy_ratio = 1.0 - signals.learner_idle_ratio
    growth = min(LARGEST_GROWTH, 1.0 / busy_ratio) if busy_ratio > 0.0 else LARGEST_GROWTH
    return max(1, math.ceil(_num_ready(fleet, signals) * growth - _ROUNDING_SLACK))


def _add_workers(spec: VCPORunSpec, fleet: FleetState, missing: int) -> dict[str, int]:
    replicas = dict(fleet.replicas)
    group = next(each for each in spec.rollouts if replicas[each.name] < each.max_replicas)
    current = replicas[group.name]
    largest = max(1, int(current * LARGEST_GROWTH))
    replicas[group.name] = group.clamp(min(current + missing, largest))
    return replicas


def _remove_workers(spec: VCPORunSpec, fleet: FleetState, spare: int) -> dict[str, int]:
    replicas = dict(fleet.replicas)
    emptied_first = reversed(spec.rollouts)
    group = next(each for each in emptied_first if replicas[each.name] > each.min_replicas)
    current = replicas[group.name]
    replicas[group.name] = group.clamp(current - min(spare, max(1, current // REMOVAL_DIVISOR)))
    return replicas


def _least_workers(spec: VCPORunSpec, fleet: FleetState, context: ScalingContext) -> int:
    """Return the smallest number of workers that a removal may leave, at least 1."""
    least = max(1, sum(group.min_replicas for group in spec.rollouts))
    if fleet.starvation is None or not _is_recent(spec, fleet.starvation, context.now_s):
        return least
    return max(least, fleet.starvation.workers + 1)


def _latest_starvation(
    spec: VCPORunSpec, fleet: FleetState, signals: RunSignals, context: ScalingContext
) -> Starvation | None:
    last = fleet.starvation
    starves = signals.learner_idle_ratio > STARVED_IDLE_RATIO
    lacks_workers = signals.last is not None and not _is_all_leased(signals, context)
    # Just after a change the idle window still covers the time before it.
    settled = _has_settled(fleet, signals, context, spec.control.scale_up_cooldown_seconds)
    if not (starves and lacks_workers and settled):
        return last
    ready = _num_ready(fleet, signals)
    if last and last.workers > ready and _is_recent(spec, last, context.now_s):
        return last
    return Starvation(workers=ready, seen_s=context.now_s)


def _is_recent(spec: VCPORunSpec, starvation: Starvation, now_s: float) -> bool:
    memory_s = STARVATION_MEMORY_COOLDOWNS * spec.control.scale_down_cooldown_seconds
    return now_s - starvation.seen_s < memory_s
