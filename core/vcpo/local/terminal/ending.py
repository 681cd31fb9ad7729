"""How a local run ended, for the exit status and the last lines on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from vcpo.records.no_update import never_updated_notice, no_update_notice, num_skipped_at_end
from vcpo.records.step_record import StepRecord


class Ending(IntEnum):
    """How a local run ended; the exit status of `vcpo run`."""

    COMPLETE = 0
    FAILED = 1
    COMPLETE_WITHOUT_UPDATE = 3
    """Every step was skipped: the model is the one that the run began with."""
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """An ending, and what there is to say about it."""

    ending: Ending
    message: str = ""
    """A sentence; empty when the ending says it all."""


def outcome_of_complete(steps: Sequence[StepRecord]) -> RunOutcome:
    """Judge a run that took all of its steps by what they did."""
    if (message := never_updated_notice(steps)) is not None:
        return RunOutcome(ending=Ending.COMPLETE_WITHOUT_UPDATE, message=message)
    reason = steps[-1].skipped or "" if steps else ""
    notice = no_update_notice(num_skipped_at_end(steps), reason)
    return RunOutcome(ending=Ending.COMPLETE, message=notice or "")
