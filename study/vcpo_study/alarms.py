"""How good the early warning of a collapse is: measured on the cells' own records.

The warning: over the last ten steps, the median ESS ratio is below 0.3 of what it is on policy. In
published runs it is so a hundred steps and more before accuracy falls; the ratio to the on-policy
one makes one threshold do for all lengths.
Source: the figures of VCPO, arXiv 2602.17616; the thresholds are this project's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from vcpo_study.measures import collapse_step
from vcpo_study.records import CellRecord, StepRow

WINDOW_STEPS: Final = 10
WARNING_SHARE: Final = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmQuality:
    """What the warning is worth over all cells of a grid."""

    num_collapses: int
    lead_steps: float | None
    """Median steps from the alarm to the collapse, over cells that collapsed; a cell without an
    alarm before it has a lead of 0. None without any."""
    false_alarm_rate: float | None
    """Share of the cells without a collapse in which there was an alarm; None without any."""


def warning_step(steps: Sequence[StepRow]) -> int | None:
    """First step at which the warning is given; None without one."""
    shares = [each.ess_ratio / each.on_policy_ess_ratio for each in steps]
    for end in range(WINDOW_STEPS, len(shares) + 1):
        if median(shares[end - WINDOW_STEPS : end]) < WARNING_SHARE:
            return steps[end - 1].step
    return None


def alarm_quality(records: Sequence[CellRecord]) -> AlarmQuality:
    """Judge the alarms in the records of a grid."""
    leads, false_alarms = [], []
    for record in records:
        warned, collapsed = warning_step(record.steps), collapse_step(record.evaluations)
        if collapsed is None:
            false_alarms.append(warned is not None)
        else:
            leads.append(0 if warned is None else max(0, collapsed - warned))
    return AlarmQuality(
        num_collapses=len(leads),
        lead_steps=median(leads) if leads else None,
        false_alarm_rate=fmean(false_alarms) if false_alarms else None,
    )
