"""Health guards: what a run does by itself when it seems to collapse, or has collapsed.

    throttle    the lag limit becomes 0: only fresh responses are trained on
    slow        the learning rate is halved until the run is well (see `rate_backoff`)
    roll back   parameters and optimizer become those of the last good checkpoint, at half the rate

The first two act while the early warning is critical. They prevent: the warning comes before the
collapse. A rollback repairs: it answers a collapse of the mean training reward (or a warning, if
the policy says so), which data shows that is fresh and ruined by its rate.

*Bounded.* A run is rolled back at most `MAX_ROLLBACKS` times, and every rollback lowers the rate.
So a run that cannot be saved ends after its last step, as any other run.

docs/inside/mathematics.md has the figures.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from vcpo.algo.health.early_warning import WarningLevel

MAX_ROLLBACKS: Final = 2
"""Most rollbacks of a run; after that many it goes on without."""


class RollbackNeed(StrEnum):
    """Whether a run is to be rolled back after a step."""

    NONE = "none"
    DUE = "due"
    USED_UP = "used_up"
    """It would be due, but the run was rolled back as often as it may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardPolicy:
    """Which guards act, and when. The default is that none does."""

    answers_warning: bool = False
    """Whether a critical warning sets the lag limit to 0 and halves the learning rate."""
    roll_back_from: WarningLevel | None = None
    """Level from which the run is rolled back; None: never because of the warning."""
    rolls_back_on_collapse: bool = False
    """Whether a collapse of the mean training reward rolls the run back."""

    @property
    def rolls_back(self) -> bool:
        return self.rolls_back_on_collapse or self.roll_back_from is not None

    @property
    def lowers_rate(self) -> bool:
        return self.answers_warning or self.rolls_back

    def answers(self, level: WarningLevel) -> bool:
        return self.answers_warning and level.is_at_least(WarningLevel.CRITICAL)

    def rollback_need(
        self, level: WarningLevel, *, has_collapsed: bool, num_rollbacks: int
    ) -> RollbackNeed:
        """Return whether the run is to be rolled back.

        has_collapsed: whether the mean training reward has, by now.
        num_rollbacks: of the run so far.
        """
        is_collapse = self.rolls_back_on_collapse and has_collapsed
        if not is_collapse and not _is_reached(self.roll_back_from, level):
            return RollbackNeed.NONE
        return RollbackNeed.DUE if num_rollbacks < MAX_ROLLBACKS else RollbackNeed.USED_UP

    def is_good(self, level: WarningLevel, *, has_collapsed: bool) -> bool:
        """Return whether a run in this state may be gone back to, whatever caused the rollback."""
        worst = self.roll_back_from or WarningLevel.CRITICAL
        limit = min(worst, WarningLevel.CRITICAL, key=list(WarningLevel).index)
        return not has_collapsed and not level.is_at_least(limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollbacks:
    """The rollbacks of a run so far; immutable."""

    number: int = 0
    """Number of rollbacks, at least 0."""
    version: int | None = None
    """Policy version that the newest rollback published; None if there was no rollback."""

    def after(self, version: int) -> Self:
        return type(self)(number=self.number + 1, version=version)

    def largest_lag_steps(self, version: int) -> int | None:
        """Return the largest lag at a version without a token from before the rollback.

        Returns None if no rollback limits it.
        """
        return None if self.version is None else max(0, version - self.version)


def _is_reached(bound: WarningLevel | None, level: WarningLevel) -> bool:
    return bound is not None and level.is_at_least(bound)
