"""The section of a run that sets what it does by itself when it seems to collapse."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.algo.health.guards import GuardPolicy
from vcpo.api.fields import Section


class GuardLevel(StrEnum):
    """Level of the early warning from which a guard acts."""

    NEVER = "never"
    WARN = "warn"
    CRITICAL = "critical"
    DEAD = "dead"

    @property
    def warning(self) -> WarningLevel | None:
        """The same level of the early warning; None for `never`."""
        return None if self is GuardLevel.NEVER else WarningLevel(self.value)


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
    """If true, the guards below act. If false, the run does nothing by itself, and its early
    warning still stands in records, metrics, conditions and alerts. Choose false to study
    collapses."""
    throttle_from: GuardLevel = GuardLevel.CRITICAL
    """The throttle acts from this level of the early warning on: `warn`, `critical`, `dead`, or
    `never`. The lag limit becomes 0 at once, older responses in the buffer are dropped, and healthy
    steps raise the limit again. A false alarm costs throughput."""
    slow_from: GuardLevel = GuardLevel.CRITICAL
    """The learning rate is halved from this level of the early warning on, and again after ten more
    steps if the warning lasts. It returns after ten well steps in a row; each later warning
    doubles their number. Choose `never` if the learning rate is known to be right for these
    data."""
    skip_from: GuardLevel = GuardLevel.NEVER
    """From this level of the early warning on, a step is skipped if its own batch has at most
    0.22 of the on-policy ESS ratio. Choose `critical` if single batches ruin the model before the
    lag limit acts."""
    roll_back_on: RollbackTrigger = RollbackTrigger.COLLAPSE
    """Event that takes model and optimizer back to the last good checkpoint, with half of the
    learning rate: `collapse` (the mean training reward of ten steps is below half of the best so
    far, beyond chance), `dead` (a collapse, or an early warning that is dead), `critical` (a
    collapse, or an early warning that is critical or dead), or `never`. Steps are not taken again:
    the run goes on with the next one. A run without a good checkpoint goes on as it is; a smaller
    `checkpoint.everySteps` loses less. Choose `never` if the tasks get harder on purpose, so that
    rewards fall."""
    max_rollbacks: Annotated[int, Field(ge=1, le=100)] = 2
    """Largest number of rollbacks in a run. After that many the run goes on without."""

    @property
    def guards(self) -> GuardPolicy:
        """The policy that the fields set; one that does nothing if they are not enabled."""
        if not self.enabled:
            return GuardPolicy()
        is_on = self.roll_back_on is not RollbackTrigger.NEVER
        return GuardPolicy(
            throttle_from=self.throttle_from.warning,
            slow_from=self.slow_from.warning,
            skip_from=self.skip_from.warning,
            roll_back_from=_LEVELS.get(self.roll_back_on),
            rolls_back_on_collapse=is_on,
            max_rollbacks=self.max_rollbacks if is_on else 0,
        )
