"""Early warning of a collapse, from the ESS of the last steps.

Relative ESS is rho / rho_on; rho alone falls with length, on policy as well. The warning judges its
exponentially weighted mean, m, over the last `SMOOTHING_STEPS` steps:

    WARN      m <= 0.33    the batches are far off policy
    CRITICAL  m <= 0.22    runs have collapsed from such a state
    DEAD      `DEAD_STEPS` steps in a row have a gradient norm below 1e-5 or an ESS below 1.5

A level ends when m exceeds 1.5 times its threshold, so a run at a threshold does not come and go.
There is no level before the fifth step, as good runs dip once or twice while AdamW's moments are
young.

Nothing that recorded cells were searched for tells collapses apart better than the mean alone, on
cells that nothing was tuned on (`python -m benchmarks.early_warning`).

*What it does not see.* A learning rate that is too high ruins a run on fresh data too, and the ESS
of fresh data shows nothing of it. A few responses with huge weights ruin a run while the mean ESS
stays above the threshold. The watch on the rewards sees both, but only afterwards (`collapse`).

Sources: VCPO, arXiv 2602.17616 (ESS falls before a collapse). The thresholds are this project's.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final, Self

SMOOTHING_STEPS: Final = 5
"""Time constant of the mean, and the first step with a level."""
WARN_RELATIVE_ESS: Final = 0.33
"""A mean relative ESS of this or less is WARN."""
CRITICAL_RELATIVE_ESS: Final = 0.22
"""A mean relative ESS of this or less is CRITICAL."""
HYSTERESIS: Final = 1.5
"""Factor on the threshold of a level, above which the level ends."""

WARN_SCORE: Final = 1 / 3
"""Score at the WARN threshold."""
CRITICAL_SCORE: Final = 2 / 3
"""Score at the CRITICAL threshold."""

DEAD_STEPS: Final = 10
_DEAD_GRADIENT_NORM: Final = 1e-5
_DEAD_ESS: Final = 1.5
"""Trajectories."""
_WORST_ALIVE: Final = 0.95
"""Score at a tenth of the CRITICAL threshold and below."""


class WarningLevel(StrEnum):
    """Health of a run, from good to bad."""

    OK = "ok"
    WARN = "warn"
    """The batches are far off policy: check the lag."""
    CRITICAL = "critical"
    """Runs look like this shortly before a collapse: lower the lag or the learning rate."""
    DEAD = "dead"
    """The run learns nothing any more: go back to a checkpoint."""

    def is_at_least(self, other: "WarningLevel") -> bool:
        order = list(WarningLevel)
        return order.index(self) >= order.index(other)


def warning_level(score: float) -> WarningLevel:
    """Return the level of a score in [0, 1]."""
    if score >= 1.0:
        return WarningLevel.DEAD
    if score >= CRITICAL_SCORE:
        return WarningLevel.CRITICAL
    return WarningLevel.WARN if score >= WARN_SCORE else WarningLevel.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHealth:
    """The numbers of one step that the warning needs."""

    relative_ess: float
    """rho / rho_on before truncation, at least 0; 0 if a weight is not finite."""

    ess: float | None = None
    """Effective sample size, in trajectories; None if unknown."""

    gradient_norm: float | None = None
    """Norm before clipping, at least 0; None if unknown, or if all advantages are 0."""

    def __post_init__(self) -> None:
        for name in ("relative_ess", "ess", "gradient_norm"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < math.inf:
                raise ValueError(f"{name} is {value}: give a finite number, 0 or above")

    @property
    def is_dead(self) -> bool:
        """Whether such a step teaches nothing."""
        norm, ess = self.gradient_norm, self.ess
        is_still = norm is not None and norm < _DEAD_GRADIENT_NORM
        return is_still or (ess is not None and ess < _DEAD_ESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyWarning:
    """What is left of the steps of a run, and the warning that follows; immutable."""

    mean: float = 0.0
    """Weighted mean of the relative ESS, in [0, 1]."""
    seen: int = 0
    """Number of steps since the start of the run."""
    dead_steps: int = 0
    """Steps in a row, up to the last one, that taught nothing."""
    level: WarningLevel = WarningLevel.OK

    def observe(self, step: StepHealth) -> Self:
        seen = self.seen + 1
        kept = (1.0 - 1.0 / SMOOTHING_STEPS) ** seen
        # The share of the newest step in a mean whose weights sum to 1 from the first step on.
        share = (1.0 / SMOOTHING_STEPS) / (1.0 - kept)
        mean = min(1.0, self.mean + share * (min(1.0, step.relative_ess) - self.mean))
        dead_steps = self.dead_steps + 1 if step.is_dead else 0
        observed = replace(self, mean=mean, seen=seen, dead_steps=dead_steps)
        # The score is read at the thresholds of the level before, so that the level lasts.
        return replace(observed, level=warning_level(observed.score))

    @property
    def score(self) -> float:
        """Severity, in [0, 1]: 1/3 is WARN, 2/3 is CRITICAL, 1 is DEAD."""
        if self.dead_steps >= DEAD_STEPS:
            return 1.0
        if self.seen < SMOOTHING_STEPS:
            return 0.0
        warn = WARN_RELATIVE_ESS * self._ease(WarningLevel.WARN)
        critical = CRITICAL_RELATIVE_ESS * self._ease(WarningLevel.CRITICAL)
        return _severity(
            self.mean,
            (1.0, 0.0),
            (warn, WARN_SCORE),
            (critical, CRITICAL_SCORE),
            (critical / 10.0, _WORST_ALIVE),
        )

    def _ease(self, level: WarningLevel) -> float:
        return HYSTERESIS if self.level.is_at_least(level) else 1.0


def _severity(value: float, *anchors: tuple[float, float]) -> float:
    """Interpolate a severity linearly in the value's logarithm between anchors (value, severity).

    The values of the anchors fall and their severities rise. Outside of them the severity is that
    of the nearest one.
    """
    for (high, above), (low, below) in pairwise(anchors):
        if value >= high:
            return above
        if value > low:
            return above + (below - above) * math.log(high / value) / math.log(high / low)
    return anchors[-1][1]
