"""Whether a run collapsed, judged by its rewards after the fact.

A measure of the run's quality, the accuracy on held-out prompts or the mean training reward, has
collapsed when it is below half of its best value before. It has recovered when its last value is at
least 0.8 of that best value. A study and the report of a run judge by this definition alike; the
early warning (`vcpo.algo.health.early_warning`) is what predicts it.

A measure that was never above 0 has no share that could be lost, so it does not collapse. Of a
measure that is the mean of few rewards, a fall within three standard errors is chance: accuracies
of 16 prompts fall from 1/16 to 0 in healthy runs. The standard error is that of rewards of 0 and 1,
sqrt(p (1 - p) / n), or 0 for larger rewards, whose spread is not known here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

COLLAPSE_SHARE: Final = 0.5
"""A measure below this share of its best value before has collapsed."""
CHANCE_ERRORS: Final = 3.0
"""Standard errors within which a fall is chance."""
RECOVERED_SHARE: Final = 0.8
"""A measure that ends with this share of its best value before the collapse has recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse:
    """The first collapse of one measure of a run."""

    step: int
    """Step of the first value below the share."""
    value: float
    """Value at that step."""
    best: float
    """Best value before, above 0."""
    best_step: int
    last: float
    """Last value of the measure."""

    @property
    def has_recovered(self) -> bool:
        """Whether the last value is near the best one before the collapse again."""
        return self.last >= RECOVERED_SHARE * self.best


def find_collapse(
    values: Sequence[tuple[int, float]], *, num_rewards: int | None = None
) -> Collapse | None:
    """Return the first collapse of a measure, or None.

    values: step and value, finite, by step.
    num_rewards: rewards that each value is the mean of, at least 1; None takes them as many.
    """
    best_step, best = values[0] if values else (0, 0.0)
    for step, value in values:
        if (
            best > 0.0
            and value < COLLAPSE_SHARE * best
            and best - value > _chance(best, num_rewards)
        ):
            last = values[-1][1]
            return Collapse(step=step, value=value, best=best, best_step=best_step, last=last)
        if value > best:
            best_step, best = step, value
    return None


def _chance(best: float, num_rewards: int | None) -> float:
    """Return the largest fall from a best value that is chance."""
    if num_rewards is None or best >= 1.0:
        return 0.0
    return CHANCE_ERRORS * math.sqrt(best * (1.0 - best) / num_rewards)
