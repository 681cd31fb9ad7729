"""Whether a run collapsed, judged by its rewards: after the fact, or step by step.

A measure of the run's quality, the accuracy on held-out prompts or the mean training reward, has
collapsed when it is below half of its best value before. It has recovered when its last value is at
least 0.8 of that best value. A study and the report of a run judge by this definition alike; the
early warning (`vcpo.algo.health.early_warning`) is what predicts it.

Step by step, the measure is the mean training reward of the last `REWARD_WINDOW_STEPS` steps.

A measure that was never above 0 has no share that could be lost, so it does not collapse. Of a
measure that is the mean of few rewards, a fall within three standard errors is chance: accuracies
of 16 prompts fall from 1/16 to 0 in healthy runs. The standard error is that of rewards of 0 and 1,
sqrt(p (1 - p) / n), or 0 for larger rewards, whose spread is not known here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final, Self

COLLAPSE_SHARE: Final = 0.5
"""A measure below this share of its best value before has collapsed."""
CHANCE_ERRORS: Final = 3.0
"""Standard errors within which a fall is chance."""
REWARD_WINDOW_STEPS: Final = 10
"""Training rewards are judged as means over so many steps in a row; one batch says little."""
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
        if _has_collapsed(best, value, num_rewards):
            last = values[-1][1]
            return Collapse(step=step, value=value, best=best, best_step=best_step, last=last)
        if value > best:
            best_step, best = step, value
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardWatch:
    """The mean training reward of a run, watched step by step; immutable."""

    batch_rewards: int
    """Rewards of one step, at least 1."""
    latest: tuple[float, ...] = ()
    """Mean rewards of the last steps, at most `REWARD_WINDOW_STEPS` of them, oldest first."""
    best: float | None = None
    """Largest mean over a window before the last one; None before there are two."""

    def observe(self, reward_mean: float) -> Self:
        """Return the watch after one more step."""
        known = [each for each in (self.best, self.value) if each is not None]
        latest = (*self.latest, reward_mean)[-REWARD_WINDOW_STEPS:]
        return replace(self, latest=latest, best=max(known, default=None))

    @property
    def value(self) -> float | None:
        """Mean reward over the last `REWARD_WINDOW_STEPS` steps; None before there are as many."""
        return fmean(self.latest) if len(self.latest) == REWARD_WINDOW_STEPS else None

    @property
    def has_collapsed(self) -> bool:
        """Whether the last window is below half of the best one before it, beyond chance."""
        num_rewards = REWARD_WINDOW_STEPS * self.batch_rewards
        if self.value is None or self.best is None:
            return False
        return _has_collapsed(self.best, self.value, num_rewards)

    def to_dict(self) -> dict[str, Any]:
        """Return the rewards as JSON values for a checkpoint."""
        return {"latest": list(self.latest), "best": self.best}

    def restore(self, state: Mapping[str, Any]) -> Self:
        """Return a watch of as large batches with the rewards that `to_dict` returned.

        Raises: ValueError if the state has another form or a reward is not finite.
        """
        try:
            latest, best = tuple(map(float, state["latest"])), state["best"]
            best = None if best is None else float(best)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"state is {str(state)[:80]}: give what to_dict of RewardWatch returned"
            ) from error
        if not all(map(math.isfinite, (*latest, best or 0.0))):
            raise ValueError(f"state is {str(state)[:80]}: give finite rewards")
        return replace(self, latest=latest[-REWARD_WINDOW_STEPS:], best=best)


def _has_collapsed(best: float, value: float, num_rewards: int | None) -> bool:
    is_low = best > 0.0 and value < COLLAPSE_SHARE * best
    return is_low and best - value > _chance(best, num_rewards)


def _chance(best: float, num_rewards: int | None) -> float:
    """Return the largest fall from a best value that is chance."""
    if num_rewards is None or best >= 1.0:
        return 0.0
    return CHANCE_ERRORS * math.sqrt(best * (1.0 - best) / num_rewards)
