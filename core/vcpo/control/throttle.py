"""Throttle: the lag limit follows the effective sample size (ESS).

    share < floor             halve the limit at once, down to 0; do not halve it again before a
                              window of steps was taken under the new limit
    floor <= share < recover  keep the limit and restart the count of healthy steps; at limit 0
                              count these steps too, but slowly
    recover <= share          add 1 after every `RECOVERY_STEPS` such steps, up to the maximum
    critical warning          set the limit to 0 at once, whatever the share is

The share is of the on-policy ESS ratio, because mismatch alone keeps the plain ratio below 1. The
throttle counts steps and not polls: a second poll of the same step changes nothing. The learner
obeys a warning by itself; the host does the same when it hears of it, starts from the learner's
limit if that is the smaller one (`follow_learner`), and decides alone when the limit rises again.

docs/inside/mathematics.md has
the reasons and the figures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from vcpo.control.signals import WINDOW_STEPS, RunSignals

RECOVERY_STEPS = 5
"""Number of healthy steps in a row that raise the limit by 1."""

PROBE_STEPS = 50
"""Number of steps in a row near the floor that raise a limit of 0 to 1; a multiple of
`RECOVERY_STEPS`."""

RECOVERY_FACTOR = 1.5
"""The ESS is healthy above the floor times this factor, or half-way to 1 if that is lower."""


class EssHealth(StrEnum):
    """Position of the ESS relative to its floor."""

    UNKNOWN = "unknown"
    BELOW_FLOOR = "belowFloor"
    NEAR_FLOOR = "nearFloor"
    HEALTHY = "healthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleState:
    """The lag limit in force and the counts that determine the next one."""

    lag_limit_steps: int
    """Limit in policy versions, in [0, maximum]."""
    progress: int = 0
    """Progress to the next raise, in [0, PROBE_STEPS): 1 for a step near the floor at limit 0,
    PROBE_STEPS / RECOVERY_STEPS for a healthy step."""
    judged_step: int | None = None
    """Newest step whose ESS was used; None before the first."""
    tightened_step: int | None = None
    """Step at which the limit was last halved; None if it was not, or after a restart."""
    tightened_lag_steps: int = 0
    """The limit after that halving."""

    def clamp(self, max_policy_lag_steps: int) -> ThrottleState:
        return replace(self, lag_limit_steps=min(self.lag_limit_steps, max_policy_lag_steps))


def follow_learner(
    throttle: ThrottleState, before: ThrottleState, *, learner_limit_steps: int, step: int
) -> ThrottleState:
    """Return the throttle after `step` with the learner's limit, if that was the smaller one.

    Only the learner itself lowers it below the host's. It may have done so between two polls and be
    well again, so recovery starts here.

    before: the throttle before the step; a step that it judged is no news.
    """
    is_news = before.judged_step is None or step > before.judged_step
    if not is_news or learner_limit_steps >= before.lag_limit_steps:
        return throttle
    return _cut(throttle, min(throttle.lag_limit_steps, learner_limit_steps), step)


def recovery_ratio(floor_ratio: float) -> float:
    """Return the share of the on-policy ESS ratio that is healthy, in [floor_ratio, 1]."""
    return min(floor_ratio * RECOVERY_FACTOR, (floor_ratio + 1.0) / 2.0)


def ess_health(floor_ratio: float, signals: RunSignals) -> EssHealth:
    """Judge the ESS: its mean, and for HEALTHY also its low percentile if that is known.

    floor_ratio: share of the on-policy ESS ratio, in (0, 1].
    """
    mean, low = signals.relative_ess_ratio_mean, signals.relative_ess_ratio_low
    if mean is None:
        return EssHealth.UNKNOWN
    if mean < floor_ratio:
        return EssHealth.BELOW_FLOOR
    if mean < recovery_ratio(floor_ratio) or (low is not None and low < floor_ratio):
        return EssHealth.NEAR_FLOOR
    return EssHealth.HEALTHY


def next_throttle(
    throttle: ThrottleState,
    *,
    health: EssHealth,
    is_warned: bool = False,
    step: int,
    max_policy_lag_steps: int,
) -> ThrottleState:
    """Return the throttle after `step`; unchanged if that step was judged before.

    A step below the judged one means that the learner resumed from a checkpoint: the counts restart
    and the limit stays.

    is_warned: whether the early warning of the step throttles the run, by its spec.
    """
    judged = throttle.judged_step
    if judged is not None and step < judged:
        return replace(throttle, progress=0, judged_step=step, tightened_step=None)
    if step == judged or (health is EssHealth.UNKNOWN and not is_warned):
        return throttle
    new_steps = 1 if judged is None else step - judged
    judged_now = replace(throttle, judged_step=step)
    if is_warned:
        return _cut(judged_now, 0, step)
    match health:
        case EssHealth.BELOW_FLOOR:
            return _tighten(judged_now, step)
        case EssHealth.HEALTHY:
            return _relax(
                judged_now, new_steps * PROBE_STEPS // RECOVERY_STEPS, max_policy_lag_steps
            )
        case EssHealth.NEAR_FLOOR if throttle.lag_limit_steps == 0:
            return _relax(judged_now, new_steps, min(1, max_policy_lag_steps))
    return replace(judged_now, progress=0)


def _tighten(throttle: ThrottleState, step: int) -> ThrottleState:
    """Halve the limit, or keep that of the last halving while the window reaches back before it."""
    before, since = throttle.lag_limit_steps, throttle.tightened_step
    # The step in progress at the halving was still taken under the previous limit.
    is_waiting = since is not None and step - since <= WINDOW_STEPS
    lag = min(before, throttle.tightened_lag_steps) if is_waiting else before // 2
    return _cut(throttle, lag, step)


def _cut(throttle: ThrottleState, lag: int, step: int) -> ThrottleState:
    """Set the limit to `lag`, which is not larger than it was, and restart the recovery."""
    if lag == throttle.lag_limit_steps:
        return replace(throttle, progress=0)
    return replace(
        throttle, lag_limit_steps=lag, progress=0, tightened_step=step, tightened_lag_steps=lag
    )


def _relax(throttle: ThrottleState, progress: int, most: int) -> ThrottleState:
    """Add progress, and raise the limit by at most 1 and up to `most`."""
    number = throttle.lag_limit_steps * PROBE_STEPS + throttle.progress
    number = min(number + min(progress, PROBE_STEPS), most * PROBE_STEPS)
    lag, rest = divmod(number, PROBE_STEPS)
    return replace(throttle, lag_limit_steps=lag, progress=rest)
