"""How a local run ended: exit status and last message."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from vcpo.records.collapse import (
    collapse_notice,
    critical_at_end_notice,
    lasting_collapse_notice,
)
from vcpo.records.journal import Metrics
from vcpo.records.no_update import never_updated_notice, no_update_notice, num_skipped_at_end


class Ending(IntEnum):
    """How a local run ended; the value is the exit status of `vcpo run`."""

    COMPLETE = 0
    FAILED = 1
    COMPLETE_WITHOUT_UPDATE = 3
    """Every step was skipped; the model is unchanged."""
    COLLAPSED = 4
    """All steps were taken, and the reward collapsed and did not recover."""
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The ending of a run and its explanation."""

    ending: Ending
    message: str = ""
    """One sentence; empty if the ending needs no explanation."""


def outcome_of_complete(metrics: Metrics) -> RunOutcome:
    """Return the outcome of a run that took all its steps, from its records."""
    steps = metrics.steps
    if (message := never_updated_notice(steps)) is not None:
        return RunOutcome(ending=Ending.COMPLETE_WITHOUT_UPDATE, message=message)
    reason = steps[-1].skipped or "" if steps else ""
    stopped = no_update_notice(num_skipped_at_end(steps), reason)
    notices = (collapse_notice(metrics), critical_at_end_notice(steps), stopped)
    message = " ".join(notice for notice in notices if notice is not None)
    if lasting_collapse_notice(metrics) is not None:
        return RunOutcome(ending=Ending.COLLAPSED, message=message)
    return RunOutcome(ending=Ending.COMPLETE, message=message)
