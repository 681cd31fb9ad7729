"""How good alarms before a collapse are, measured on the records of cells.

The warning is the learner's own, `vcpo.algo.EarlyWarning`. It is computed again from the recorded
numbers, so that other thresholds can be judged without running a cell again. An alarm is the first
step at a level, and counts only before the collapse; see `measures.collapse_step`.

The alert `VCPOEffectiveSampleSizeLow` (`charts/vcpo/files/rules.yaml`) is judged beside it. It
waits for ten minutes, which are `LOW_ESS_STEPS` steps of 20 s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from vcpo.algo import EarlyWarning, StepHealth, WarningLevel, WarningThresholds
from vcpo.control.signals import WINDOW_STEPS
from vcpo_study.cells.records import CellRecord, EvaluationRow
from vcpo_study.results.measures import collapse_step

JUDGED_LEVELS: Final = (WarningLevel.WARN, WarningLevel.CRITICAL)
"""Levels of the early warning that a report judges."""

LOW_RELATIVE_ESS: Final = WarningThresholds().lasting_relative_ess
"""Share of the on-policy ESS ratio below which the alert counts a step."""

LOW_ESS_STEPS: Final = 30
"""Steps in a row, after which the alert fires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRun:
    """What the alarms of a finished run are judged by."""

    levels: tuple[tuple[int, WarningLevel], ...]
    """Step and the level after it, by step."""
    evaluations: tuple[EvaluationRow, ...]


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


def alarm_qualities(records: Sequence[CellRecord]) -> Mapping[str, AlarmQuality]:
    """Return the quality of the early warning's levels and of the alert of a low ESS, by name."""
    runs = [watched_run(record) for record in records]
    levels = {level.value: judge_alarms(runs, at_least=level) for level in JUDGED_LEVELS}
    return {**levels, "low_ess": low_ess_quality(records)}


def watched_run(record: CellRecord) -> WatchedRun:
    """Return the early warning's level after each step of a cell."""
    steps = record.steps
    numbers = zip(
        steps.ess_ratio,
        steps.on_policy_ess_ratio,
        steps.ess,
        steps.kl_per_token,
        steps.gradient_norm,
        strict=True,
    )
    warning = EarlyWarning()
    levels = []
    for step, (ess_ratio, on_policy, ess, kl_per_token, gradient_norm) in enumerate(numbers, 1):
        health = StepHealth(
            relative_ess=ess_ratio / on_policy,
            ess=ess,
            kl_per_token=kl_per_token,
            gradient_norm=gradient_norm or None,
        )
        warning = warning.observe(health)
        levels.append((step, warning.level))
    return WatchedRun(levels=tuple(levels), evaluations=record.evaluations)


def judge_alarms(
    runs: Sequence[WatchedRun], *, at_least: WarningLevel = WarningLevel.WARN
) -> AlarmQuality:
    """Return the quality of an alarm over finished runs.

    at_least: lowest level that counts as an alarm.
    """
    alarms = [
        next((step for step, level in run.levels if level.is_at_least(at_least)), None)
        for run in runs
    ]
    return _quality(alarms, [collapse_step(run.evaluations) for run in runs])


def low_ess_quality(
    records: Sequence[CellRecord], *, num_steps: int = LOW_ESS_STEPS
) -> AlarmQuality:
    """Return the quality of the alert of a low ESS in the records of cells.

    num_steps: steps in a row with a low ESS, after which it fires.
    """
    alarms = [_low_ess_step(record, num_steps) for record in records]
    return _quality(alarms, [collapse_step(record.evaluations) for record in records])


def _low_ess_step(record: CellRecord, num_steps: int) -> int | None:
    """Return the step at which the mean ESS has been low for `num_steps` steps; None if never."""
    window: deque[float] = deque(maxlen=WINDOW_STEPS)
    num_low = 0
    ratios = zip(record.steps.ess_ratio, record.steps.on_policy_ess_ratio, strict=True)
    for step, (ess_ratio, on_policy) in enumerate(ratios, 1):
        window.append(ess_ratio)
        is_low = fmean(window) / on_policy < LOW_RELATIVE_ESS
        num_low = num_low + 1 if is_low else 0
        if num_low == num_steps:
            return step
    return None


def _quality(alarms: Sequence[int | None], collapses: Sequence[int | None]) -> AlarmQuality:
    """Return the quality of alarms; both sequences have the first step of each run, or None."""
    leads, false_alarms = [], []
    for alarm, collapse in zip(alarms, collapses, strict=True):
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
