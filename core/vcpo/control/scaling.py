"""Scaling: the number of rollout workers follows the learner's waiting.

Problem. More workers raise throughput *and* staleness, and past the admission bound they raise
nothing: whoever asks gets no work. Measurements are noisy, workers take minutes to start, and each
change of the fleet disturbs what is measured.

    the learner waits more than `idleHighRatio`        starved: add, if that can help at all
    it waits less than `idleLowRatio`, and workers
    have used up what the lag bound admits             saturated: remove
    otherwise                                          balanced: leave

Adding helps only while work is left to hand out (outstanding below the admission bound), the
median lag has room and the ESS is healthy. What is wanted follows from the workers that are ready:
they feed the learner for the share 1 - idle of its time, so ready / (1 - idle) would feed it all of
it. Workers still on their way count as there, so that waiting for them adds no others.

Against flapping: the dead band between the thresholds, cool-downs, one change per learner step, at
most a doubling or a quarter at a time, and memory: a removal never goes down to a number of workers
with which the learner starved lately. Without it a learner that needs 1.5 workers would see 1 and 2
in turn for ever. Groups are filled in the spec's order, one at a time, and emptied in the reverse.

Rejected: scaling to a target buffer level. With admission control the buffer's level is set by the
lag bound, and says nothing of how many workers it takes to keep it there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from vcpo.control.conditions import Reason
from vcpo.control.limits import Limits
from vcpo.control.signals import RunSignals

ADMISSION_FULL_RATIO = 0.9
"""Work is all handed out when this share of what the lag bound admits is outstanding."""

LAG_ROOM_RATIO = 0.75
"""Workers are added only while the median lag is within this share of the admission lag."""

LARGEST_GROWTH = 2.0
"""Replicas grow at most by this factor at a time."""

REMOVAL_DIVISOR = 4
"""At most one part in so many of a group's replicas goes at a time, and at least one replica."""

STARVATION_MEMORY_COOLDOWNS = 10
"""Scale-down cool-downs for which a number of workers that starved the learner is remembered: each
time it is forgotten the learner may starve for as long as a worker takes to start."""

# 31 / 0.62 is 50 workers, and 31 * (1 / (1 - 0.38)) is 50.00000000000001 in floats.
_ROUNDING_SLACK = 1e-9


class Direction(StrEnum):
    """Which way the number of workers goes."""

    UP = "up"
    DOWN = "down"
    HOLD = "hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Starvation:
    """The learner starved with this many workers ready, last seen then."""

    workers: int
    seen_s: float
    """Time of the last sight, on the clock of the decisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """Replicas wanted, and what the next ones depend on."""

    replicas: Mapping[str, int]
    """Workers wanted, by rollout group."""
    scaled_s: float
    """Time of the last change, or of the start, on the clock of the decisions."""
    scaled_step: int | None = None
    """Learner's step at the last change; None when there was none."""
    starvation: Starvation | None = None
    """What a removal may not go back to; None when the learner never starved for workers."""

    @property
    def total(self) -> int:
        """Workers wanted in all groups."""
        return sum(self.replicas.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingContext:
    """What besides the signals a change of the fleet depends on."""

    admission_lag_steps: int
    """Lag bound decided for new work, in policy versions."""
    ess_has_room: bool
    now_s: float


def next_fleet(
    limits: Limits, fleet: FleetState, signals: RunSignals, context: ScalingContext
) -> tuple[FleetState, Reason]:
    """Replicas to want now, with the reason that `LearnerFed` gets.

    fleet: its replicas are within the limits.
    """
    fleet = replace(fleet, starvation=_remembered(limits, fleet, signals, context))
    reason = _judge(limits, fleet, signals, context)
    if reason is Reason.SCALING_UP:
        replicas = _grown(limits, fleet, _wanted_workers(fleet, signals) - fleet.total)
    elif reason is Reason.SCALING_DOWN:
        replicas = _shrunk(limits, fleet, fleet.total - _least_workers(limits, fleet, context))
    else:
        return fleet, reason
    changed = replace(fleet, replicas=replicas, scaled_s=context.now_s, scaled_step=signals.step)
    return changed, reason


def _judge(
    limits: Limits, fleet: FleetState, signals: RunSignals, context: ScalingContext
) -> Reason:
    if signals.ess_ratio_mean is None or signals.lag_p50 is None:
        return Reason.NO_STEP_YET
    if signals.learner_idle_ratio > limits.idle_high_ratio:
        return _judge_starved(limits, fleet, signals, context)
    if signals.learner_idle_ratio < limits.idle_low_ratio and _work_is_out(signals, context):
        return _judge_saturated(limits, fleet, signals, context)
    return Reason.BALANCED


def _judge_starved(
    limits: Limits, fleet: FleetState, signals: RunSignals, context: ScalingContext
) -> Reason:
    if _work_is_out(signals, context):
        return Reason.ADMISSION_BOUND
    if not context.ess_has_room:
        return Reason.ESS_LOW
    if not _lag_has_room(signals, context.admission_lag_steps):
        return Reason.LAG_HIGH
    if fleet.total >= sum(group.max_replicas for group in limits.groups):
        return Reason.AT_MAXIMUM
    if _wanted_workers(fleet, signals) <= fleet.total:
        return Reason.WORKERS_PENDING
    if not _settled(fleet, signals, context, limits.scale_up_cooldown_s):
        return Reason.COOLING_DOWN
    return Reason.SCALING_UP


def _judge_saturated(
    limits: Limits, fleet: FleetState, signals: RunSignals, context: ScalingContext
) -> Reason:
    if fleet.total <= _least_workers(limits, fleet, context):
        return Reason.AT_MINIMUM
    if not _settled(fleet, signals, context, limits.scale_down_cooldown_s):
        return Reason.SATURATED
    return Reason.SCALING_DOWN


def _work_is_out(signals: RunSignals, context: ScalingContext) -> bool:
    admitted = (context.admission_lag_steps + 1) * signals.batch_trajectories
    return signals.outstanding >= ADMISSION_FULL_RATIO * admitted


def _lag_has_room(signals: RunSignals, admission_lag_steps: int) -> bool:
    """Whether the lag is as low as admission asks, at its top and, with a margin, in the middle."""
    if signals.lag_max is not None and signals.lag_max > admission_lag_steps:
        return False
    middle = signals.lag_p50 or 0
    return middle <= math.ceil(LAG_ROOM_RATIO * admission_lag_steps)


def _settled(
    fleet: FleetState, signals: RunSignals, context: ScalingContext, cooldown_s: float
) -> bool:
    return signals.step != fleet.scaled_step and context.now_s - fleet.scaled_s >= cooldown_s


def _working(fleet: FleetState, signals: RunSignals) -> int:
    return min(fleet.total, sum(signals.ready_workers.values()))


def _wanted_workers(fleet: FleetState, signals: RunSignals) -> int:
    busy_ratio = 1.0 - signals.learner_idle_ratio
    growth = min(LARGEST_GROWTH, 1.0 / busy_ratio) if busy_ratio > 0.0 else LARGEST_GROWTH
    return max(1, math.ceil(_working(fleet, signals) * growth - _ROUNDING_SLACK))


def _grown(limits: Limits, fleet: FleetState, missing: int) -> dict[str, int]:
    replicas = dict(fleet.replicas)
    group = next(each for each in limits.groups if replicas[each.name] < each.max_replicas)
    current = replicas[group.name]
    largest = max(1, int(current * LARGEST_GROWTH))
    replicas[group.name] = group.clamp(min(current + missing, largest))
    return replicas


def _shrunk(limits: Limits, fleet: FleetState, spare: int) -> dict[str, int]:
    replicas = dict(fleet.replicas)
    emptied_first = reversed(limits.groups)
    group = next(each for each in emptied_first if replicas[each.name] > each.min_replicas)
    current = replicas[group.name]
    replicas[group.name] = group.clamp(current - min(spare, max(1, current // REMOVAL_DIVISOR)))
    return replicas


def _least_workers(limits: Limits, fleet: FleetState, context: ScalingContext) -> int:
    """Fewest workers that a removal may leave: the minimum, one, or one more than starved."""
    least = max(1, sum(group.min_replicas for group in limits.groups))
    if fleet.starvation is None or not _is_recent(limits, fleet.starvation, context.now_s):
        return least
    return max(least, fleet.starvation.workers + 1)


def _remembered(
    limits: Limits, fleet: FleetState, signals: RunSignals, context: ScalingContext
) -> Starvation | None:
    """Largest number of ready workers with which the learner starved of late."""
    known = fleet.starvation
    starves = signals.learner_idle_ratio > limits.idle_high_ratio
    for_workers = signals.ess_ratio_mean is not None and not _work_is_out(signals, context)
    # Just after a change the idle window still shows what was before it.
    settled = _settled(fleet, signals, context, limits.scale_up_cooldown_s)
    if not (starves and for_workers and settled):
        return known
    working = _working(fleet, signals)
    if known and known.workers > working and _is_recent(limits, known, context.now_s):
        return known
    return Starvation(workers=working, seen_s=context.now_s)


def _is_recent(limits: Limits, starvation: Starvation, now_s: float) -> bool:
    memory_s = STARVATION_MEMORY_COOLDOWNS * limits.scale_down_cooldown_s
    return now_s - starvation.seen_s < memory_s
