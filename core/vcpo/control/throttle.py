"""ThrottleState: the lag limit follows the effective sample size.

Stale data makes importance weights heavy-tailed; the effective sample size (ESS) is where that
shows first. Its measure here is the share of the on-policy ESS ratio, because train/rollout
mismatch alone keeps the plain ratio below 1.

    share < floor             halve the limit at once, down to 0; then wait until a window of
                              steps was taken under the new limit before halving it again
    floor <= share < recover  keep it, and start counting anew; at 0 count, but slowly
    recover <= share          add 1 after every `RECOVERY_STEPS` steps like that, up to the maximum

Fast down and slow up (as TCP does with its window) since a collapse costs a run and a low lag only
time. The gap between floor and recovery keeps a share that hovers about the floor from moving the
limit back and forth. Steps count, not polls: a second look at the same step changes nothing.

*One window per halving.* The share is a mean over the last `WINDOW_STEPS` steps, most of which were
taken under the limit before. Judged by them, a limit of 8 would be 0 after four steps, before any
of those could show relief. The wait costs no safety: the limit binds what is trained on, at once.

*A way back from 0.* Between floor and recovery the limit stays where it is in balance. At 0 that is
no balance: every token is of the newest version, so staleness cannot be what holds the share down,
and whether a lag of 1 would is seen by trying. `PROBE_STEPS` steps in a row not below the floor
raise it to 1.

From one state, a lower ESS never leads to the larger limit. Of two runs, one that is never below
the floor never has the smaller limit; two that are, at different steps, may be a window apart. The
design note 016 has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from vcpo.control.signals import WINDOW_STEPS, RunSignals

RECOVERY_STEPS = 5
"""Healthy steps in a row that raise the limit by one."""

PROBE_STEPS = 50
"""Steps in a row near the floor that raise a limit of 0 to 1; a multiple of `RECOVERY_STEPS`."""

RECOVERY_FACTOR = 1.5
"""ESS is healthy above the floor times this, or half-way to 1 where that is less."""


class EssHealth(StrEnum):
    """Where the ESS stands against its floor."""

    UNKNOWN = "unknown"
    BELOW_FLOOR = "belowFloor"
    NEAR_FLOOR = "nearFloor"
    HEALTHY = "healthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleState:
    """Lag limit in force, and what the next one depends on."""

    admission_lag_steps: int
    """Limit in policy versions, in [0, maximum]."""
    progress: int = 0
    """Way to the next raise, in steps near the floor; a healthy one is `PROBE_STEPS` /
    `RECOVERY_STEPS` of them. Below `PROBE_STEPS`."""
    judged_step: int | None = None
    """Newest step whose ESS was taken into account; None before the first."""
    tightened_step: int | None = None
    """Step at which the limit was last halved; None when it was not, or before a restart."""
    tightened_lag_steps: int = 0
    """Limit that it was halved to then."""

    def clamp(self, max_lag_steps: int) -> ThrottleState:
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
    throttle: ThrottleState, *, health: EssHealth, step: int, max_lag_steps: int
) -> ThrottleState:
    """ThrottleState after a look at `step`; unchanged when that step was judged before.

    A step below the judged one means that the learner went back to a checkpoint: counting starts
    anew there, and the limit stays.
    """
    judged = throttle.judged_step
    if judged is not None and step < judged:
        return replace(throttle, progress=0, judged_step=step, tightened_step=None)
    if health is EssHealth.UNKNOWN or step == judged:
        return throttle
    new_steps = 1 if judged is None else step - judged
    seen = replace(throttle, judged_step=step)
    match health:
        case EssHealth.BELOW_FLOOR:
            return _tightened(seen, step)
        case EssHealth.HEALTHY:
            return _raised(seen, new_steps * PROBE_STEPS // RECOVERY_STEPS, max_lag_steps)
        case EssHealth.NEAR_FLOOR if throttle.admission_lag_steps == 0:
            return _raised(seen, new_steps, min(1, max_lag_steps))
    return replace(seen, progress=0)


def _tightened(throttle: ThrottleState, step: int) -> ThrottleState:
    """Half the limit; or, while the window reaches behind the last fall, what that one set."""
    before, since = throttle.admission_lag_steps, throttle.tightened_step
    # The step that was under way at a fall was still taken under the limit before.
    is_waiting = since is not None and step - since <= WINDOW_STEPS
    lag = min(before, throttle.tightened_lag_steps) if is_waiting else before // 2
    tightened = replace(throttle, admission_lag_steps=lag, progress=0)
    if lag == before:
        return tightened
    return replace(tightened, tightened_step=step, tightened_lag_steps=lag)


def _raised(throttle: ThrottleState, progress: int, most: int) -> ThrottleState:
    """Progress made, up to the limit `most`.

    Steps nobody looked at do not add up to more than one raise.
    """
    number = throttle.admission_lag_steps * PROBE_STEPS + throttle.progress
    number = min(number + min(progress, PROBE_STEPS), most * PROBE_STEPS)
    lag, rest = divmod(number, PROBE_STEPS)
    return replace(throttle, admission_lag_steps=lag, progress=rest)
