"""How a local run ended: exit status and last message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from vcpo.records.no_update import never_updated_notice, no_update_notice, num_skipped_at_end
from vcpo.records.step_record import StepRecord


class Ending(IntEnum):
    """How a local run ended; the value is the exit status of `vcpo run`."""

    COMPLETE = 0
    FAILED = 1
    COMPLETE_WITHOUT_UPDATE = 3
    """Every step was skipped; the model is unchanged."""
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """The ending of a run and its explanation."""

    ending: Ending
    message: str = ""
    """One sentence; empty if the ending needs no explanation."""


def outcome_of_complete(steps: Sequence[StepRecord]) -> RunOutcome:
    """Return the outcome of a run that took all its steps, from the records of the steps."""
    if (message := never_updated_notice(steps)) is not None:
        return RunOutcome(ending=Ending.COMPLETE_WITHOUT_UPDATE, message=message)
    reason = steps[-1].skipped or "" if steps else ""
    notice = no_update_notice(num_skipped_at_end(steps), reason)
    return RunOutcome(ending=Ending.COMPLETE, message=notice or "")
