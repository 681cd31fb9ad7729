"""How good alarms before a collapse are, measured on the records of cells.

The warning is the learner's own, `vcpo.algo.EarlyWarning`. It is computed again from the recorded
numbers, so that other thresholds can be judged without running a cell again. An alarm is the first
step at a level, and counts only before the collapse; see `measures.collapse_step`.

The alert `VCPOEffectiveSampleSizeLow` (`charts/vcpo/files/rules.yaml`) is judged beside it. It
waits for ten minutes, which are `LOW_ESS_STEPS` steps of 20 s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from research.cells.records import CellRecord, StepColumns
from research.measures import collapse_step
from vcpo.algo.health.early_warning import EarlyWarning, StepHealth, WarningLevel
from vcpo.control.signals import WINDOW_STEPS

JUDGED_LEVELS: Final = (WarningLevel.WARN, WarningLevel.CRITICAL)
"""Levels of the early warning that are judged; a worse level counts for each of them."""

LOW_ESS: Final = "low_ess"
"""Name of the alert of a low ESS."""

LOW_RELATIVE_ESS: Final = 0.3
"""Share of the on-policy ESS ratio below which the alert counts a step."""

LOW_ESS_STEPS: Final = 30
"""Steps in a row, after which the alert fires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """When a finished run raised alarms, and when it collapsed."""

    lag: int
    """Age of its batches, in policy versions."""
    first_alarms: Mapping[str, int | None]
    """First step of each alarm, by its name; None when it never came."""
    collapse: int | None
    """Step of the evaluation that shows the collapse; None when the run held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmQuality:
    """Quality of an alarm over a set of runs."""

    num_collapses: int
    """Runs that collapsed."""
    num_warned: int
    """Collapsed runs with an alarm before the collapse."""
    lead_steps: float | None
    """Median over collapsed runs of the steps from alarm to collapse; a run without an alarm before
    its collapse counts as 0. None when no run collapsed."""
    false_alarm_rate: float | None
    """Share of the other runs that had an alarm; None when every run collapsed."""


def watched_run(record: CellRecord) -> WatchedRun:
    """Return when a cell raised each alarm, and when it collapsed."""
    first: dict[str, int | None] = dict.fromkeys([*JUDGED_LEVELS, LOW_ESS])
    for step, level in enumerate(_levels(record.steps), start=1):
        for judged in JUDGED_LEVELS:
            if first[judged] is None and level.is_at_least(judged):
                first[judged] = step
    first[LOW_ESS] = _low_ess_step(record.steps)
    return WatchedRun(
        lag=record.lag, first_alarms=first, collapse=collapse_step(record.evaluations)
    )


def alarm_qualities(runs: Sequence[WatchedRun]) -> Mapping[str, AlarmQuality]:
    """Return the quality of each alarm, by its name, over finished runs."""
    return {name: _quality(runs, name) for name in (*JUDGED_LEVELS, LOW_ESS)}


def _levels(steps: StepColumns) -> Iterator[WarningLevel]:
    """Yield the level of the early warning after each step."""
    warning = EarlyWarning()
    numbers = zip(
        steps.ess_ratio, steps.on_policy_ess_ratio, steps.ess, steps.gradient_norm, strict=True
    )
    for ess_ratio, on_policy, ess, gradient_norm in numbers:
        warning = warning.observe(
            StepHealth(
                relative_ess=ess_ratio / on_policy, ess=ess, gradient_norm=gradient_norm or None
            )
        )
        yield warning.level


def _low_ess_step(steps: StepColumns) -> int | None:
    """Return the step at which the mean ESS has been low for `LOW_ESS_STEPS`; None if never."""
    window: deque[float] = deque(maxlen=WINDOW_STEPS)
    num_low = 0
    ratios = zip(steps.ess_ratio, steps.on_policy_ess_ratio, strict=True)
    for step, (ess_ratio, on_policy) in enumerate(ratios, start=1):
        window.append(ess_ratio)
        is_low = fmean(window) / on_policy < LOW_RELATIVE_ESS
        num_low = num_low + 1 if is_low else 0
        if num_low == LOW_ESS_STEPS:
            return step
    return None


def _quality(runs: Sequence[WatchedRun], name: str) -> AlarmQuality:
    leads, false_alarms = [], []
    for run in runs:
        alarm = run.first_alarms[name]
        if run.collapse is None:
            false_alarms.append(alarm is not None)
        else:
            leads.append(0 if alarm is None else max(0, run.collapse - alarm))
    return AlarmQuality(
        num_collapses=len(leads),
        num_warned=sum(lead > 0 for lead in leads),
        lead_steps=median(leads) if leads else None,
        false_alarm_rate=fmean(false_alarms) if false_alarms else None,
    )
