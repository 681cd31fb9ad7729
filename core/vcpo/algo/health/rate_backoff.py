"""Backoff of the learning rate of a run that seems to collapse, or has collapsed.

A run that gets fresh data and keeps its rate recovers, and comes back to the same place as soon as
its data may age again. So every warning that is bad enough (`GuardPolicy.answers`), and every
rollback, also halves the rate.

    a warning     halve the factor, at most once in `WINDOW_STEPS` steps
    a rollback    halve the factor and its ceiling for good, unless the warning of the same step did
    well          after `CALM_STEPS` well steps in a row, double the factor, up to the ceiling;
                  each later warning doubles that number of steps

A run that cannot bear its rate tries it again after 10, 20, 40 steps and so on, ever more seldom.
docs/inside/mathematics.md has the figures.
"""

from dataclasses import dataclass, replace
from typing import Final, Self

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
    """Factor on the learning rate that warnings and rollbacks have left; immutable."""

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
