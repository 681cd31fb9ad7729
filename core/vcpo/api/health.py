"""The section of a run that sets what it does by itself when it seems to collapse."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field

from vcpo.algo import GuardPolicy, WarningLevel
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
    """Whether the guards below act. If false, the run does nothing by itself; its early warning
    still stands in records, metrics, conditions and alerts. Choose false to study collapses."""
    throttle_from: GuardLevel = GuardLevel.CRITICAL
    """Level of the early warning from which only fresh responses are trained on: `warn`, `critical`
    or `dead`, or `never`. The lag limit becomes 0 at once, what is buffered and older is dropped,
    and healthy steps raise the limit again. A false alarm costs throughput."""
    slow_from: GuardLevel = GuardLevel.CRITICAL
    """Level of the early warning from which the learning rate is halved for the rest of the run,
    again after ten more steps if the warning lasts. A false alarm costs half of the rate. Choose
    `never` if the learning rate is known to be right for these data."""
    skip_from: GuardLevel = GuardLevel.NEVER
    """Level of the early warning from which a step is skipped if its own batch has at most a fifth
    of the on-policy ESS ratio. Choose `critical` if single batches ruin the model before the lag
    limit acts."""
    roll_back_on: RollbackTrigger = RollbackTrigger.COLLAPSE
    """What takes the model and the optimizer back to the last good checkpoint, with half of the
    learning rate: `collapse` (the mean training reward of ten steps is below half of the best so
    far, beyond chance), `dead` (that, or an early warning that is dead), `critical` (that, or one
    that is critical), or `never`. Steps are not taken again: the run goes on with the next one. A
    run without a good checkpoint goes on as it is; a smaller `checkpoint.everySteps` loses less.
    Choose `never` if the tasks get harder on purpose, so that rewards fall."""
    max_rollbacks: Annotated[int, Field(ge=1, le=100)] = 2
    """Most rollbacks of a run. Then it goes on as it is."""

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
