"""Whether a run collapsed, judged by its rewards: after the fact, or step by step.

A measure of the run's quality has collapsed when it is below half of its best value before, and
recovered when its last value is at least 0.8 of that best value. A study, a report and the guards
of a run judge by this definition alike. A fall within three standard errors of the best value is
chance. Of an accuracy only the mean is known here, and its standard error is sqrt(p (1 - p) / n).

Step by step, the measure is a mean over the training rewards of the last `REWARD_WINDOW_STEPS`
steps: that of the middle worker, by a median in which each counts with its rewards. So workers
that send less than half of the rewards move it among the means of the others, whatever they send.
A worker's few rewards have a large error.

A worker's mean is winsorized: the four largest count as the fifth largest does, and the four
smallest as the fifth smallest; two of a worker that sends a quarter of all, and so on. So four
wrong rewards of any workers bend nothing.

*Why four.* Among n rewards of 0 and 1, j wrong ones make a fall of 2 j / n at most. Three standard
errors, at the least mean for which it is that, are 3 sqrt(2 j) / n: more while j is at most 4.

*Far rewards.* An event names rewards whose distance from the median is over 100 times that of the
farthest tenth. An evaluation leaves out those that are over 1,000 times as far as the fifth
farthest: at most four are, so rare good rewards count.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from statistics import fmean, median, pstdev
from typing import Final, Self

COLLAPSE_SHARE: Final = 0.5
"""A measure below this share of its best value before has collapsed."""
CHANCE_ERRORS: Final = 3.0
"""Standard errors within which a fall is chance."""
BENT_REWARDS: Final = 4
"""Wrong rewards at each end of a window that bend no mean; the module says why four."""
FAR_DISTANCES: Final = 100.0
"""A reward is far if it is so many times as far from the median as nine tenths are."""
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
    best: float
    """Best value before, above 0."""
    best_step: int
    last: float

    @property
    def has_recovered(self) -> bool:
        return self.last >= RECOVERED_SHARE * self.best


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardMean:
    """A mean of rewards, or of another measure."""

    value: float
    error: float
    """Its standard error, at least 0."""
    by_worker: Mapping[str, float] = field(default_factory=dict)
    """The means of the workers, if it is one over a window."""

    @property
    def lowest(self) -> float:
        return self.value - CHANCE_ERRORS * self.error


def reward_limits(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest reward that would not be far from these.

    rewards: at least one, finite.
    """
    middle = median(rewards)
    distances = sorted((abs(reward - middle) for reward in rewards), reverse=True)
    reach = FAR_DISTANCES * distances[len(distances) // 10] or _reach_of_few(distances)
    return middle - reach, middle + reach


def near_rewards(rewards: Sequence[float]) -> list[float]:
    """Return the rewards without at most four that are far from the others; at least one."""
    middle = median(rewards)
    reach = _reach_of_few(sorted((abs(reward - middle) for reward in rewards), reverse=True))
    return [reward for reward in rewards if abs(reward - middle) <= reach]


def window_mean(rewards: Mapping[str, Sequence[float]]) -> RewardMean:
    """Return the mean of the middle worker, as the module says.

    rewards: by worker, at least one of each, finite.
    """
    total = sum(map(len, rewards.values()))
    means = {
        name: _winsorized_mean(own, min(BENT_REWARDS, 2 * BENT_REWARDS * len(own) // total))
        for name, own in rewards.items()
    }
    order = sorted(means, key=lambda name: means[name].value)
    ends = accumulate(len(rewards[name]) for name in order)
    at, reach = next(at for at, end in enumerate(ends) if 2 * end >= total), len(order) // 16
    middle = [means[name] for name in order[max(0, at - reach) : at + reach + 1]]
    return RewardMean(
        value=fmean(each.value for each in middle),
        error=math.hypot(*(each.error for each in middle)) / len(middle),
        by_worker={name: means[name].value for name in order},
    )


def _winsorized_mean(rewards: Sequence[float], num_bent: int) -> RewardMean:
    ordered = sorted(rewards)
    num_bent = min(num_bent, (len(ordered) - 1) // 2)
    low, high = ordered[num_bent], ordered[-1 - num_bent]
    counted = [min(max(reward, low), high) for reward in ordered]
    return RewardMean(value=fmean(counted), error=pstdev(counted) / math.sqrt(len(counted)))


def _reach_of_few(distances: Sequence[float]) -> float:
    """Return the distance beyond which at most four are; distances: from the farthest on."""
    usual = distances[BENT_REWARDS] if len(distances) > BENT_REWARDS else 0.0
    return 1000.0 * usual or math.inf


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

    latest: tuple[Mapping[str, tuple[float, ...]], ...] = ()
    """Rewards by worker of the last steps, at most `REWARD_WINDOW_STEPS` of them, oldest first."""
    last: RewardMean | None = None
    """Mean over the last `REWARD_WINDOW_STEPS` steps; None before there are as many."""
    best: RewardMean | None = None
    """Best mean over a window before the last one; None before there are two."""

    def observe(self, rewards: Mapping[str, Sequence[float]]) -> Self:
        """Return the watch after one more step.

        rewards: of the step's trajectories by worker, at least one of each, finite.
        """
        known = [each for each in (self.best, self.last) if each is not None]
        step = {name: tuple(own) for name, own in rewards.items()}
        latest = (*self.latest, step)[-REWARD_WINDOW_STEPS:]
        window = {
            name: [reward for each in latest for reward in each.get(name, ())]
            for name in dict.fromkeys(chain.from_iterable(latest))
        }
        is_full = len(latest) == REWARD_WINDOW_STEPS
        return replace(
            self,
            latest=latest,
            last=window_mean(window) if is_full else None,
            best=max(known, key=lambda each: each.lowest, default=None),
        )

    @property
    def limits(self) -> tuple[float, float] | None:
        rewards = [reward for each in self.latest for own in each.values() for reward in own]
        return reward_limits(rewards) if rewards else None

    @property
    def has_collapsed(self) -> bool:
        """Whether the last window is below half of the best one before it, beyond chance."""
        if self.last is None or self.best is None:
            return False
        return _has_fallen(self.best, self.last.value, COLLAPSE_SHARE)

    @property
    def fall(self) -> str:
        """The fall from the best window to the last one, as a clause; empty before two windows."""
        if self.last is None or self.best is None:
            return ""
        before, after = self.best.by_worker, self.last.by_worker
        fallen = max(before.keys() & after, key=lambda one: before[one] - after[one], default="")
        most = fallen and f", most at {fallen}: {before[fallen]:.3g} to {after[fallen]:.3g}"
        return (
            f"the mean reward of {REWARD_WINDOW_STEPS} steps fell from {self.best.value:.3g} to"
            f" {self.last.value:.3g}{most}"
        )


def _has_fallen(best: RewardMean, value: float, share: float) -> bool:
    return best.value > 0.0 and value < min(share * best.value, best.lowest)
