"""Whether a run collapsed, judged by its rewards: after the fact, or step by step.

A measure of the run's quality has collapsed when it is below half of its best value before, and
recovered when its last value is at least 0.8 of that best value. A study, a report and the guards
of a run judge by this definition alike. A fall within three standard errors of the best value is
chance. Of an accuracy only the mean is known here, and its standard error is sqrt(p (1 - p) / n).

Step by step, the measure is the winsorized mean over the training rewards of the last
`REWARD_WINDOW_STEPS` steps: the four largest count as the fifth largest does, and the four smallest
as the fifth smallest. The best window is the one whose mean less three standard errors is largest.

*Why four.* Among n rewards of 0 and 1 of which m are 1, j wrong ones raise the mean to (m + j) / n
at most, and may lower it to max(0, m - j) / n later. The fall is 2 j / n at most, or all of it for
m < j. Three standard errors are 3 sqrt(m + j) / n for rare ones. With m = j, the least for which it
is 2 j / n, that is 3 sqrt(2 j) / n, and more than the fall while j is at most 4.

*Far rewards.* A reward is far if its distance from the median is over 1,000 times the fifth largest
one: at most four are. An event names them, and an evaluation leaves them out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean, median, pstdev
from typing import Final, Self

COLLAPSE_SHARE: Final = 0.5
"""A measure below this share of its best value before has collapsed."""
CHANCE_ERRORS: Final = 3.0
"""Standard errors within which a fall is chance."""
BENT_REWARDS: Final = 4
"""Wrong rewards at each end of a window that bend no mean; the module says why four."""
FAR_DISTANCES: Final = 1000.0
"""A reward is far if it is so many times as far from the median as the fifth farthest."""
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
        return self.last >= RECOVERED_SHARE * self.best


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMean:
    """A mean of rewards, or of another measure."""

    value: float
    error: float
    """Its standard error, at least 0."""

    @property
    def lowest(self) -> float:
        return self.value - CHANCE_ERRORS * self.error


def reward_limits(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest reward that would not be far from these.

    rewards: at least one, finite.
    """
    middle = median(rewards)
    distances = sorted((abs(reward - middle) for reward in rewards), reverse=True)
    usual = distances[BENT_REWARDS] if len(distances) > BENT_REWARDS else 0.0
    reach = FAR_DISTANCES * usual or math.inf
    return middle - reach, middle + reach


def near_rewards(rewards: Sequence[float]) -> list[float]:
    """Return the rewards that are not far from the others; at least one."""
    low, high = reward_limits(rewards)
    return [reward for reward in rewards if low <= reward <= high]


def typical_mean(rewards: Sequence[float]) -> RewardMean:
    """Return the mean of rewards of which few may be wrong, as the module says.

    rewards: at least one, finite.
    """
    ordered = sorted(rewards)
    num_bent = min(BENT_REWARDS, (len(ordered) - 1) // 2)
    low, high = ordered[num_bent], ordered[-1 - num_bent]
    counted = [min(max(reward, low), high) for reward in ordered]
    return RewardMean(value=fmean(counted), error=pstdev(counted) / math.sqrt(len(counted)))


def share_error(share: float, num_rewards: int) -> float:
    """Return the standard error of a mean of rewards of 0 and 1; 0 for a mean of larger ones."""
    return math.sqrt(share * (1.0 - share) / num_rewards) if 0.0 < share < 1.0 else 0.0


def find_collapse(
    values: Sequence[tuple[int, float]], *, errors: Sequence[float] | None = None
) -> Collapse | None:
    """Return the first collapse of a measure, or None.

    values: step and value, finite, by step.
    errors: standard error of each value; None takes them as exact.
    """
    best_step, best = 0, RewardMean(value=0.0, error=0.0)
    known = errors if errors is not None else [0.0] * len(values)
    for number, ((step, value), error) in enumerate(zip(values, known, strict=True)):
        if _has_fallen(best, value, COLLAPSE_SHARE):
            last = values[-1][1]
            return Collapse(step=step, value=value, best=best.value, best_step=best_step, last=last)
        reading = RewardMean(value=value, error=error)
        if number == 0 or reading.lowest > best.lowest:
            best_step, best = step, reading
    return None


def num_low_at_end(values: Sequence[float], *, errors: Sequence[float]) -> int:
    """Return how many of the last values in a row lie below 0.8 of the best one before them.

    A fall within chance is none. Half of the best is a collapse, but evaluations are rare: a run
    that lost a fifth twice in a row is worth a look.

    values: of one measure, finite, by step; errors: their standard errors.
    """
    best, number = RewardMean(value=0.0, error=0.0), 0
    for position, (value, error) in enumerate(zip(values, errors, strict=True)):
        number = number + 1 if _has_fallen(best, value, RECOVERED_SHARE) else 0
        reading = RewardMean(value=value, error=error)
        if position == 0 or reading.lowest > best.lowest:
            best = reading
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardWatch:
    """The training rewards of a run, watched step by step; immutable."""

    latest: tuple[tuple[float, ...], ...] = ()
    """Rewards of the last steps, at most `REWARD_WINDOW_STEPS` of them, oldest first."""
    last: RewardMean | None = None
    """Mean over the last `REWARD_WINDOW_STEPS` steps; None before there are as many."""
    best: RewardMean | None = None
    """Best mean over a window before the last one; None before there are two."""

    def observe(self, rewards: Sequence[float]) -> Self:
        """Return the watch after one more step.

        rewards: of the step's trajectories, at least one, finite.
        """
        known = [each for each in (self.best, self.last) if each is not None]
        latest = (*self.latest, tuple(rewards))[-REWARD_WINDOW_STEPS:]
        is_full = len(latest) == REWARD_WINDOW_STEPS
        return replace(
            self,
            latest=latest,
            last=typical_mean(list(chain.from_iterable(latest))) if is_full else None,
            best=max(known, key=lambda each: each.lowest, default=None),
        )

    @property
    def limits(self) -> tuple[float, float] | None:
        rewards = list(chain.from_iterable(self.latest))
        return reward_limits(rewards) if rewards else None

    @property
    def has_collapsed(self) -> bool:
        """Whether the last window is below half of the best one before it, beyond chance."""
        if self.last is None or self.best is None:
            return False
        return _has_fallen(self.best, self.last.value, COLLAPSE_SHARE)


def _has_fallen(best: RewardMean, value: float, share: float) -> bool:
    return best.value > 0.0 and value < min(share * best.value, best.lowest)
