"""Backoff of the learning rate of a run that seems to collapse, or has collapsed.

Old data and a high learning rate cause a collapse together: the rate sets how far the policy moves
in one step, and the lag sets over how many steps that adds up. A run that gets fresh data and keeps
its rate recovers, and comes back to the same place as soon as its data may age again. So every
warning that is bad enough (`GuardPolicy.slows`), and every rollback, also halves the rate.

    a warning     halve the factor, at most once in `WINDOW_STEPS` steps
    a rollback    halve it, unless the warning of the same step did
    else          keep it

The warning judges a window of ten steps, so it stays critical for some steps after the cause is
gone; only later steps show what the halving did. The factor does not rise again by itself: what the
run did at the higher rate is known. The design note 068 has the figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

BACKOFF_FACTOR: Final = 0.5
"""Factor on the learning rate for each warning or rollback."""

SMALLEST_BACKOFF: Final = 1 / 64
"""Smallest factor: six halvings. A run that collapses at this rate has another fault."""

WINDOW_STEPS: Final = 10
"""Least number of steps between two halvings because of a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateBackoff:
    """Factor on the learning rate that warnings and rollbacks have left; immutable."""

    factor: float = 1.0
    """Factor on the learning rate, in [SMALLEST_BACKOFF, 1]."""
    age_steps: int | None = None
    """Steps since the last halving; None if there was none."""

    def observe(self, *, is_warned: bool) -> Self:
        """Return the backoff after a step; it holds from the next step on.

        is_warned: whether the early warning of the step slows the run, by its spec.
        """
        age = None if self.age_steps is None else self.age_steps + 1
        is_waiting = age is not None and age <= WINDOW_STEPS
        aged = replace(self, age_steps=age)
        return aged if is_waiting or not is_warned else aged._halved()

    def after_rollback(self) -> Self:
        """Return the backoff after a rollback that follows the step observed last."""
        return self if self.age_steps == 0 else self._halved()

    def _halved(self) -> Self:
        factor = max(SMALLEST_BACKOFF, self.factor * BACKOFF_FACTOR)
        return replace(self, factor=factor, age_steps=0)

    def to_dict(self) -> dict[str, Any]:
        """Return the backoff as JSON values for a checkpoint."""
        return {"factor": self.factor, "age_steps": self.age_steps}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Read what `to_dict` returned.

        Raises: ValueError if the state has another form or the factor is out of range.
        """
        try:
            age = state["age_steps"]
            backoff = cls(
                factor=float(state["factor"]), age_steps=None if age is None else int(age)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"state is {str(state)[:80]}: give what to_dict of RateBackoff returned"
            ) from error
        if not SMALLEST_BACKOFF <= backoff.factor <= 1.0:
            raise ValueError(
                f"factor is {backoff.factor}: give a number in [{SMALLEST_BACKOFF:g}, 1]"
            )
        return backoff
