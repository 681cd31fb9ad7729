"""What a step's record says of the last steps: for how many in a row, and means over a window."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.control.signals import WINDOW_STEPS
from vcpo.records.step_record import StepRecord

_LOW_QUANTILE = 0.1


def streak_fields(
    before: StepRecord | None,
    *,
    level: WarningLevel,
    has_collapsed: bool,
    skipped: str | None,
    lag_limit_steps: int,
    max_policy_lag_steps: int,
) -> dict[str, Any]:
    """Return the fields of a step's record that count steps in a row, this one included.

    before: the step before; None begins all counts anew.
    level, has_collapsed: early warning and reward after the step.
    skipped: why it made no update; None if it did.
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
        "skipped_steps": (skipped is not None) * (1 + (before.skipped_steps if before else 0)),
    }


def window_fields(
    last: Collection[StepRecord], *, ess_ratio: float, step_s: float, idle_s: float
) -> dict[str, Any]:
    """Return the fields of a step's record that are means over the last steps and this one.

    last: the steps before, at most `WINDOW_STEPS`. ess_ratio: 0 if a weight has no value.
    """
    known = [*(one.ess_ratio for one in last), ess_ratio][-WINDOW_STEPS:]
    ratios = [ratio for ratio in known if ratio]
    return {
        "ess_ratio_mean": sum(ratios) / len(ratios) if ratios else None,
        "ess_ratio_low": sorted(ratios)[int(_LOW_QUANTILE * (len(ratios) - 1))] if ratios else None,
        "step_interval_s": (sum(each.step_s + each.idle_s for each in last) + step_s + idle_s)
        / (1 + len(last)),
    }
