"""Throttle: the admission lag follows the effective sample size.

Stale data makes importance weights heavy-tailed; the effective sample size (ESS) is where that
shows first. Its measure here is the share of the on-policy ESS ratio, because train/rollout
mismatch alone keeps the plain ratio below 1.

    share < floor             halve the admission lag at once, once per new step, down to 0
    floor <= share < recover  keep it, and start counting anew
    recover <= share          add 1 after every `RECOVERY_STEPS` steps like that, up to the maximum

Fast down and slow up (as TCP does with its window) since a collapse costs a run and a low lag only
time. The gap between floor and recovery keeps a share that hovers about the floor from moving the
lag back and forth. Steps count, not polls: a second look at the same step changes nothing.

Lag and healthy steps form one number, `lag * RECOVERY_STEPS + healthy steps`, and every rule above
is monotone in it. Hence of two runs with the same steps, the one whose ESS is never higher never
has the larger lag.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from vcpo.control.signals import RunSignals

RECOVERY_STEPS = 5
"""Healthy steps in a row that raise the admission lag by one."""

RECOVERY_FACTOR = 1.5
"""ESS is healthy above the floor times this, or half-way to 1 where that is less."""


class EssHealth(StrEnum):
    """Where the ESS stands against its floor."""

    UNKNOWN = "unknown"
    BELOW_FLOOR = "belowFloor"
    NEAR_FLOOR = "nearFloor"
    HEALTHY = "healthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """Admission lag in force, and what the next one depends on."""

    admission_lag_steps: int
    """Lag bound for new work, in policy versions, in [0, maximum]."""
    healthy_steps: int = 0
    """Healthy steps in a row since the last change, below `RECOVERY_STEPS`."""
    judged_step: int | None = None
    """Newest step whose ESS was taken into account; None before the first."""

    def clamp(self, max_lag_steps: int) -> Throttle:
        """The same throttle under a maximum that may have changed."""
        return replace(self, admission_lag_steps=min(self.admission_lag_steps, max_lag_steps))


def recovery_ratio(floor_ratio: float) -> float:
    """Share of the on-policy ESS ratio from which ESS is healthy, in [floor_ratio, 1]."""
    return min(floor_ratio * RECOVERY_FACTOR, (floor_ratio + 1.0) / 2.0)


def ess_health(floor_ratio: float, signals: RunSignals) -> EssHealth:
    """Judge the ESS; it is healthy only when its low percentile, if known, has left the floor too.

    floor_ratio: share of the on-policy ESS ratio, in (0, 1].
    """
    mean, low = signals.relative_ess_ratio, signals.relative_ess_ratio_low
    if mean is None:
        return EssHealth.UNKNOWN
    if mean < floor_ratio:
        return EssHealth.BELOW_FLOOR
    if mean < recovery_ratio(floor_ratio) or (low is not None and low < floor_ratio):
        return EssHealth.NEAR_FLOOR
    return EssHealth.HEALTHY


def next_throttle(
    throttle: Throttle, *, health: EssHealth, step: int, max_lag_steps: int
) -> Throttle:
    """Throttle after a look at `step`; unchanged when that step was judged before.

    A step below the judged one means that the learner went back to a checkpoint: counting starts
    anew there, and the lag stays.
    """
    judged = throttle.judged_step
    if judged is not None and step < judged:
        return replace(throttle, healthy_steps=0, judged_step=step)
    if health is EssHealth.UNKNOWN or step == judged:
        return throttle
    # Steps nobody looked at may not add up to a jump: one look raises the lag by one at most.
    new_steps = 1 if judged is None else min(step - judged, RECOVERY_STEPS)
    lag, healthy_steps = throttle.admission_lag_steps, 0
    if health is EssHealth.BELOW_FLOOR:
        lag //= 2
    elif health is EssHealth.HEALTHY and lag < max_lag_steps:
        raised, healthy_steps = divmod(throttle.healthy_steps + new_steps, RECOVERY_STEPS)
        lag += raised
    return Throttle(admission_lag_steps=lag, healthy_steps=healthy_steps, judged_step=step)
