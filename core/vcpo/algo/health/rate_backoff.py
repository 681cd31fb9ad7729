"""Backoff of the learning rate while the early warning of a collapse is critical.

Old data and a high learning rate cause a collapse together: the rate sets how far the policy moves
in one step, and the lag sets over how many steps that adds up. A run that gets fresh data and keeps
its rate recovers, and comes back to the same place as soon as its data may age again. So every
critical warning also halves the rate.

    critical or worse    halve the factor, at most once in `WINDOW_STEPS` steps
    else                 keep it

The warning judges a window of ten steps, so it stays critical for some steps after the cause is
gone; only later steps show what the halving did. The factor does not rise again by itself: what the
run did at the higher rate is known. The design note 068 has the figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from vcpo.algo.health.early_warning import WarningLevel

BACKOFF_FACTOR: Final = 0.5
"""Factor on the learning rate for each critical warning."""

SMALLEST_BACKOFF: Final = 1 / 64
"""Smallest factor: six halvings. A run that is critical at this rate has another fault."""

WINDOW_STEPS: Final = 10
"""Least number of steps between two halvings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateBackoff:
    """Factor on the learning rate that the warnings so far have left; immutable."""

    factor: float = 1.0
    """In [SMALLEST_BACKOFF, 1]."""
    age_steps: int | None = None
    """Steps since the last halving; None if there was none."""

    def observe(self, level: WarningLevel) -> Self:
        """Return the backoff after a step with this warning; it holds from the next step on."""
        age = None if self.age_steps is None else self.age_steps + 1
        is_waiting = age is not None and age <= WINDOW_STEPS
        if is_waiting or not level.is_at_least(WarningLevel.CRITICAL):
            return replace(self, age_steps=age)
        return replace(
            self, factor=max(SMALLEST_BACKOFF, self.factor * BACKOFF_FACTOR), age_steps=0
        )

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
