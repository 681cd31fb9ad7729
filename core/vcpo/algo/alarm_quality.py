"""How good an alarm is: how long before a collapse it comes, and how often for nothing.

A run collapses when its accuracy, or reward, falls below half of the best so far. An alarm counts
once a level was held for a number of steps on end, and only before the collapse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median
from typing import Final

from vcpo.algo.health.early_warning import WarningLevel

COLLAPSE_SHARE: Final = 0.5
"""A run has collapsed when its performance is below this share of the best before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """A finished run, as its alarm is judged by."""

    levels: tuple[tuple[int, WarningLevel], ...]
    """Step and the level after it, by step."""

    performance: tuple[tuple[int, float], ...]
    """Step and accuracy or reward at it, by step; more is better, at least 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmQuality:
    """What an alarm is worth over a set of runs."""

    num_collapses: int
    """Runs that collapsed."""

    num_warned: int
    """Of these, the ones with an alarm before the collapse."""

    lead_steps: float | None
    """Median over runs that collapsed of the steps from alarm to collapse, 0 for one without an
    alarm before it; None when no run collapsed."""

    false_alarm_rate: float | None
    """Share of the runs without a collapse in which there was an alarm; None without any."""


def evaluate_alarms(
    runs: Sequence[WatchedRun],
    *,
    at_least: WarningLevel = WarningLevel.WARN,
    sustained_steps: int = 1,
) -> AlarmQuality:
    """Judge an alarm by runs whose end is known.

    at_least: the level that counts as an alarm; sustained_steps: how many steps on end, at least 1.
    Raises: ValueError when sustained_steps is out of range.
    """
    leads, false_alarms = [], []
    for run in runs:
        collapse = collapse_step(run.performance)
        alarm = alarm_step(run.levels, at_least=at_least, sustained_steps=sustained_steps)
        if collapse is None:
            false_alarms.append(alarm is not None)
        else:
            leads.append(0 if alarm is None else max(0, collapse - alarm))
    return AlarmQuality(
        num_collapses=len(leads),
        num_warned=sum(lead > 0 for lead in leads),
        lead_steps=median(leads) if leads else None,
        false_alarm_rate=fmean(false_alarms) if false_alarms else None,
    )


def collapse_step(performance: Sequence[tuple[int, float]]) -> int | None:
    """Step at which performance is first below half of the best so far; None without one."""
    best = accumulate((value for _, value in performance), max)
    for (step, value), highest in zip(performance, best, strict=True):
        if value < COLLAPSE_SHARE * highest:
            return step
    return None


def alarm_step(
    levels: Sequence[tuple[int, WarningLevel]], *, at_least: WarningLevel, sustained_steps: int
) -> int | None:
    """Step at which a level has first been held for so many steps on end; None without one.

    Raises: ValueError when sustained_steps is out of range.
    """
    if sustained_steps < 1:
        raise ValueError(f"sustained_steps is {sustained_steps}: give at least 1")
    held = 0
    for step, level in levels:
        held = held + 1 if level.is_at_least(at_least) else 0
        if held == sustained_steps:
            return step
    return None
