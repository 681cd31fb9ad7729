"""How serious an event is: the level of its log line."""

from __future__ import annotations

import logging
from typing import Final

_ERRORS: Final = frozenset({"Failed", "SelfCheckFailed"})
"""Kinds that end the run."""
_WARNINGS: Final = frozenset(
    {
        "CalibrationStale",
        "CheckpointDamaged",
        "CheckpointIgnored",
        "CollapseWarning",
        "Collapsed",
        "DiskFull",
        "DiskSpaceLow",
        "DrainFailed",
        "DrainTimedOut",
        "EnginesDisagree",
        "EvaluationWithoutResult",
        "GenerationFailed",
        "GroupQuarantined",
        "JournalDamaged",
        "LearnerRestarted",
        "LearnerStuck",
        "LogDamaged",
        "LogFull",
        "LogMarkLost",
        "NoUpdate",
        "NotRolledBack",
        "RedoDiffers",
        "RedoStopped",
        "RewardsFar",
        "RolledBack",
        "SelfCheckWaits",
        "SignalsStale",
        "Throttled",
        "Warning",
        "WorkerLost",
        "WorkerSetAside",
    }
)
"""Kinds that a person should read; none of them ends the run before its last step."""


def event_level(kind: str) -> int:
    """Return the level of `logging` for an event of this kind."""
    if kind in _ERRORS:
        return logging.ERROR
    return logging.WARNING if kind in _WARNINGS else logging.INFO
