"""The section of a run that sets what it does by itself when it seems to collapse."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.algo.health.guards import GuardPolicy
from vcpo.api.fields import Section


class RollbackTrigger(StrEnum):
    """What rolls a run back to its last good checkpoint; each trigger includes those before it."""

    NEVER = "never"
    COLLAPSE = "collapse"
    """A collapse of the mean training reward."""
    DEAD = "dead"
    """An early warning that is dead."""
    CRITICAL = "critical"
    """An early warning that is critical."""


_LEVELS: Final = {
    RollbackTrigger.DEAD: WarningLevel.DEAD,
    RollbackTrigger.CRITICAL: WarningLevel.CRITICAL,
}


class Health(Section):
    """What a run does by itself about its early warning of a collapse, and about a collapse."""

    enabled: bool = True
    """If true, the run acts on its early warning. At a critical one the lag limit becomes 0 at
    once, and the learning rate is halved, again after ten more steps if the warning lasts; both
    return as the run gets well. `rollBackOn` says when the run goes back. If false, the run does
    nothing by itself, and its early warning still stands in records, metrics, conditions and
    alerts. Choose false to study collapses."""
    roll_back_on: RollbackTrigger = RollbackTrigger.COLLAPSE
    """Event that takes model and optimizer back to the last good checkpoint, with half of the
    learning rate: `collapse` (the mean training reward of ten steps is below half of the best so
    far, beyond chance), `dead` (a collapse, or an early warning that is dead), `critical` (a
    collapse, or an early warning that is critical or dead), or `never`. Steps are not taken again:
    the run goes on with the next one. A run without a good checkpoint goes on as it is; a smaller
    `checkpoint.everySteps` loses less. Choose `never` if the tasks get harder on purpose, so that
    rewards fall. A run is rolled back at most twice."""

    @property
    def guards(self) -> GuardPolicy:
        """The policy that the fields set; one that does nothing if they are not enabled."""
        if not self.enabled:
            return GuardPolicy()
        return GuardPolicy(
            answers_warning=True,
            roll_back_from=_LEVELS.get(self.roll_back_on),
            rolls_back_on_collapse=self.roll_back_on is not RollbackTrigger.NEVER,
        )
