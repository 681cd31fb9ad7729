"""For how many steps in a row a run has been in trouble: what alerts count, at any pace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.records.step_record import StepRecord


def streak_fields(
    before: StepRecord | None,
    *,
    level: WarningLevel,
    has_collapsed: bool,
    lag_limit_steps: int,
    max_policy_lag_steps: int,
) -> dict[str, Any]:
    """Return the fields of a step's record that count steps in a row, this one included.

    before: the step before; None begins all counts anew.
    level, has_collapsed: early warning and reward after the step.
    lag_limit_steps: the limit under which its batch was taken, of a bound of
        `max_policy_lag_steps`. A limit that rises is a recovery.
    """
    is_critical = level in (WarningLevel.CRITICAL, WarningLevel.DEAD)
    rises = before is not None and lag_limit_steps > before.lag_limit_steps
    is_throttled = lag_limit_steps < max_policy_lag_steps and not rises
    return {
        "critical_steps": is_critical * (1 + (before.critical_steps if before else 0)),
        "collapsed_steps": has_collapsed * (1 + (before.collapsed_steps if before else 0)),
        "throttled_steps": is_throttled * (1 + (before.throttled_steps if before else 0)),
    }


def usual_step_s(last: Sequence[StepRecord], *, step_s: float, idle_s: float) -> float:
    """Return the mean time of the last steps and of one that ends now, each with its wait."""
    return (sum(each.step_s + each.idle_s for each in last) + step_s + idle_s) / (1 + len(last))
