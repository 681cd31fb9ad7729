"""How good the early warning of a collapse is: measured on the cells' own records.

The warning is the learner's own, `vcpo.algo.EarlyWarning`, gone through again from the recorded
numbers, so that other thresholds can be judged without running a cell anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vcpo.algo import (
    AlarmQuality,
    EarlyWarning,
    StepHealth,
    WarningLevel,
    WatchedRun,
    evaluate_alarms,
)
from vcpo_study.records import CellRecord, StepRow


def alarm_quality(
    records: Sequence[CellRecord], at_least: WarningLevel = WarningLevel.CRITICAL
) -> AlarmQuality:
    """Judge the alarms of this level in the records of cells."""
    return evaluate_alarms([watched(record) for record in records], at_least=at_least)


def watched(record: CellRecord) -> WatchedRun:
    """A cell as its alarms are judged by."""
    return WatchedRun(
        levels=tuple(_levels(record.steps)),
        performance=tuple((each.step, each.accuracy) for each in record.evaluations),
    )


def _levels(steps: Sequence[StepRow]) -> Iterator[tuple[int, WarningLevel]]:
    warning = EarlyWarning()
    for row in steps:
        health = StepHealth(
            relative_ess=row.ess_ratio / row.on_policy_ess_ratio,
            ess=row.ess,
            kl_per_token=row.kl_per_token,
            gradient_norm=row.gradient_norm or None,
        )
        warning = warning.observe(health)
        yield row.step, warning.level
