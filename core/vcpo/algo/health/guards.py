"""Health guards: what a run does by itself when it seems to collapse, or has collapsed.

    throttle    the lag limit becomes 0: only fresh responses are trained on
    slow        the learning rate is halved until the run is well (see `RateBackoff`)
    roll back   parameters and optimizer become those of the last good checkpoint, at half the rate

The first two act while the early warning is critical. They prevent: the warning comes before the
collapse. A rollback repairs: it answers a collapse of the mean training reward (or a warning, if
the policy says so), which data shows that is fresh and ruined by its rate.

*Bounded.* A run is rolled back at most `MAX_ROLLBACKS` times, and every rollback lowers the rate.
So a run that cannot be saved ends after its last step, as any other run.

docs/inside/mathematics.md has the figures.
"""

from dataclasses import dataclass, replace
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


BACKOFF_FACTOR: Final = 0.5
"""Factor on the learning rate for each warning or rollback."""

SMALLEST_BACKOFF: Final = 1 / 64
"""Smallest factor: six halvings. A run that collapses at this rate has another fault."""

WINDOW_STEPS: Final = 10
"""Least number of steps between two halvings because of a warning."""

CALM_STEPS: Final = 10
"""Well steps in a row after which the first halving is taken back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateBackoff:
    """Factor on the learning rate that warnings and rollbacks have left; immutable.

    A run that gets fresh data and keeps its rate recovers, and comes back to the same place as soon
    as its data may age again. So every warning that is bad enough (`GuardPolicy.answers`), and
    every rollback, also halves the rate.

        a warning     halve the factor, at most once in `WINDOW_STEPS` steps
        a rollback    halve the factor and its ceiling for good, unless the warning of the same step
                      did
        well          after `CALM_STEPS` well steps in a row, double the factor, up to the ceiling;
                      each later warning doubles that number of steps

    A run that cannot bear its rate tries it again after 10, 20, 40 steps and so on, ever more
    seldom.
    """

    factor: float = 1.0
    """Factor on the learning rate, in [SMALLEST_BACKOFF, ceiling]."""
    ceiling: float = 1.0
    """Factor that rollbacks have left, in [SMALLEST_BACKOFF, 1]."""
    age_steps: int | None = None
    """Steps since the last halving; None if there was none."""
    calm_steps: int = 0
    """Well steps in a row since the factor changed."""
    wanted_calm_steps: int = CALM_STEPS
    """Well steps in a row that double the factor."""

    def observe(self, *, is_warned: bool, is_well: bool = False) -> Self:
        """Return the backoff after a step; it holds from the next step on.

        is_warned: whether the early warning of the step slows the run, by its spec.
        is_well: whether there is no warning.
        """
        age = None if self.age_steps is None else self.age_steps + 1
        aged = replace(self, age_steps=age, calm_steps=self.calm_steps + 1 if is_well else 0)
        if is_warned:
            is_waiting = age is not None and age <= WINDOW_STEPS
            return aged if is_waiting else aged._warn()
        if aged.calm_steps < self.wanted_calm_steps or self.factor >= self.ceiling:
            return aged
        factor = min(self.ceiling, self.factor / BACKOFF_FACTOR)
        return replace(aged, factor=factor, calm_steps=0)

    def after_rollback(self) -> Self:
        lowered = self if self.age_steps == 0 else self._halve()
        return replace(lowered, ceiling=lowered.factor)

    def _warn(self) -> Self:
        is_first = self.age_steps is None
        wanted = self.wanted_calm_steps if is_first else 2 * self.wanted_calm_steps
        return replace(self._halve(), wanted_calm_steps=wanted)

    def _halve(self) -> Self:
        factor = max(SMALLEST_BACKOFF, self.factor * BACKOFF_FACTOR)
        return replace(self, factor=factor, age_steps=0, calm_steps=0)
