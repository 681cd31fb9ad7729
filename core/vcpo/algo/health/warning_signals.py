"""Severity of each sign of a collapse in the last steps of a run, for `early_warning`.

A signal is a number computed from the window. Its severity is linear in the number's logarithm
between thresholds: 0 is good, 1/3 is the threshold of WARN, 2/3 of CRITICAL, and 1 is DEAD.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Final

WARN_SCORE: Final = 1 / 3
"""Severity of a signal at its WARN threshold."""

CRITICAL_SCORE: Final = 2 / 3
"""Severity of a signal at its CRITICAL threshold."""

LATEST_STEPS: Final = 3
"""Latest steps whose median divergence is compared with the trailing steps; one step may be an
outlier."""

_WORST_WARNING: Final = 0.6
_WORST_ALIVE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningThresholds:
    """Thresholds of the signals."""

    window_steps: int = 10
    """Number of latest steps in the window, at least 3."""

    trailing_steps: int = 50
    """Number of steps before the last three that a breakout is compared with; at least
    `window_steps`."""

    lasting_relative_ess: float = 0.3
    """A full window with this median relative ESS or a lower one is WARN; in (0, 1)."""

    dip_relative_ess: float = 0.2
    """A step with this relative ESS or a lower one is a dip; in (0, 1)."""

    dip_steps: int = 3
    """Number of dips in the window that is WARN, in [1, window_steps]."""

    bad_relative_ess: float = 0.1
    """A step with this relative ESS or a lower one and a high divergence is bad; in (0, 1). A full
    window without a step above it is CRITICAL."""

    bad_kl_per_token: float = 0.1
    """A step with a low ESS and this KL divergence or a higher one is bad; nats per token. 0 makes
    every step with a low ESS bad."""

    bad_steps: int = 2
    """Number of bad steps in the window that is CRITICAL, in [1, window_steps]."""

    early_steps: int = 10
    """First steps of a run in which a bad step counts half, at least 0."""

    kl_breakout: float = 10.0
    """Factor on the trailing median at which the KL divergence is CRITICAL during dips; above 1."""

    kl_floor: float = 1e-3
    """KL divergence below which there is no breakout, nats per token, above 0."""

    dead_gradient_norm: float = 1e-5
    """A full window with a median gradient norm below this one is DEAD."""

    dead_ess: float = 1.5
    """A full window with a median effective sample size below this one is DEAD; trajectories."""

    def __post_init__(self) -> None:
        if self.early_steps < 0:
            raise ValueError(f"early_steps is {self.early_steps}: give at least 0")
        if not LATEST_STEPS <= self.window_steps <= self.trailing_steps:
            raise ValueError(
                f"window_steps is {self.window_steps}: give at least {LATEST_STEPS} and at most "
                f"trailing_steps, which is {self.trailing_steps}"
            )
        for name in ("lasting_relative_ess", "dip_relative_ess", "bad_relative_ess"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a share in (0, 1)")
        for name in ("dip_steps", "bad_steps"):
            if not 1 <= getattr(self, name) <= self.window_steps:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: give at least 1 and at most window_steps, "
                    f"which is {self.window_steps}"
                )
        for name, least in (("kl_breakout", 1.0), ("kl_floor", 0.0)):
            if not getattr(self, name) > least:
                raise ValueError(f"{name} is {getattr(self, name)}: give more than {least:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHealth:
    """The numbers of one step that the warning needs."""

    relative_ess: float
    """rho / rho_on before truncation, at least 0; 0 if a weight is not finite."""

    ess: float | None = None
    """Effective sample size, in trajectories; None if unknown."""

    kl_per_token: float | None = None
    """KL(behavior || target), nats per token, at least 0; None if unknown, which counts as high in
    a step with a low ESS."""

    gradient_norm: float | None = None
    """Norm before clipping, at least 0; None if unknown, or if all advantages are 0."""

    def __post_init__(self) -> None:
        for name in ("relative_ess", "ess", "kl_per_token", "gradient_norm"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < math.inf:
                raise ValueError(f"{name} is {value}: give a finite number, 0 or above")


def signal_severities(
    steps: Sequence[StepHealth], thresholds: WarningThresholds, forgotten: int = 0
) -> dict[str, float]:
    """Return the severity of every signal by name, in [0, 1]; 0 if it needs more steps.

    steps: of one run, oldest first.
    forgotten: number of steps of the run before them.
    """
    window = steps[-thresholds.window_steps :]
    num_early = thresholds.early_steps - forgotten - (len(steps) - len(window))
    dips = _dips(window, thresholds)
    return {
        "dips": dips,
        "lasting_loss": _lasting_loss(window, thresholds),
        "bad_steps": _bad_steps(window, thresholds, max(0, num_early)),
        "unbroken_loss": _unbroken_loss(window, thresholds),
        "breakout": _breakout(steps, thresholds) if dips >= WARN_SCORE else 0.0,
        "death": _death(window, thresholds),
    }


def _dips(window: Sequence[StepHealth], thresholds: WarningThresholds) -> float:
    """Rate the highest relative ESS among the `dip_steps` lowest steps."""
    lowest = sorted(step.relative_ess for step in window)[: thresholds.dip_steps]
    if len(lowest) < max(thresholds.dip_steps, LATEST_STEPS):
        return 0.0
    threshold = thresholds.dip_relative_ess
    return _severity(
        lowest[-1], (1.0, 0.0), (threshold, WARN_SCORE), (threshold / 10, _WORST_WARNING)
    )


def _lasting_loss(window: Sequence[StepHealth], thresholds: WarningThresholds) -> float:
    if len(window) < thresholds.window_steps:
        return 0.0
    middle = median(step.relative_ess for step in window)
    threshold = thresholds.lasting_relative_ess
    return _severity(middle, (1.0, 0.0), (threshold, WARN_SCORE), (threshold / 10, _WORST_WARNING))


def _bad_steps(
    window: Sequence[StepHealth], thresholds: WarningThresholds, num_early: int
) -> float:
    """Rate steps that have a low ESS and a high divergence; 0 until there are enough of them.

    num_early: number of first steps of the window in which a bad step counts half.
    """
    threshold = thresholds.bad_relative_ess
    bad = sorted(
        (step.relative_ess, 0.5 if index < num_early else 1.0)
        for index, step in enumerate(window)
        if step.relative_ess <= threshold
        and (step.kl_per_token is None or step.kl_per_token >= thresholds.bad_kl_per_token)
    )
    weights = accumulate(weight for _, weight in bad)
    enough = (
        relative_ess
        for (relative_ess, _), weight in zip(bad, weights, strict=True)
        if weight >= thresholds.bad_steps
    )
    value = next(enough, None)
    if value is None:
        return 0.0
    return _severity(value, (threshold, CRITICAL_SCORE), (threshold / 10, _WORST_ALIVE))


def _unbroken_loss(window: Sequence[StepHealth], thresholds: WarningThresholds) -> float:
    """Rate the best step of a full window; 0 while it is above the threshold."""
    best = max((step.relative_ess for step in window), default=math.inf)
    threshold = thresholds.bad_relative_ess
    if len(window) < thresholds.window_steps or best > threshold:
        return 0.0
    return _severity(best, (threshold, CRITICAL_SCORE), (threshold / 10, _WORST_ALIVE))


def _breakout(steps: Sequence[StepHealth], thresholds: WarningThresholds) -> float:
    """Rate the rise of the latest divergence over the trailing one; 0 below the factor."""
    seen = [step.kl_per_token for step in steps if step.kl_per_token is not None]
    latest, trailing = seen[-LATEST_STEPS:], seen[:-LATEST_STEPS][-thresholds.trailing_steps :]
    if len(trailing) < thresholds.window_steps or median(latest) < thresholds.kl_floor:
        return 0.0
    factor = thresholds.kl_breakout
    rise = median(latest) / max(median(trailing), thresholds.kl_floor / factor)
    if rise < factor:
        return 0.0
    return _severity(rise, (factor, CRITICAL_SCORE), (factor**2, _WORST_ALIVE))


def _death(window: Sequence[StepHealth], thresholds: WarningThresholds) -> float:
    """Return 1 if the median gradient norm or ESS of a full window is below its threshold."""
    if len(window) < thresholds.window_steps:
        return 0.0
    norms = [math.inf if step.gradient_norm is None else step.gradient_norm for step in window]
    sizes = [math.inf if step.ess is None else step.ess for step in window]
    is_dead = median(norms) < thresholds.dead_gradient_norm or median(sizes) < thresholds.dead_ess
    return 1.0 if is_dead else 0.0


def _severity(value: float, *anchors: tuple[float, float]) -> float:
    """Interpolate a severity linearly in the value's logarithm between anchors (value, severity).

    The severities rise from anchor to anchor; the values rise or fall. Outside the anchors the
    severity is that of the nearest one.
    """
    sign = 1.0 if anchors[-1][0] > anchors[0][0] else -1.0
    position = sign * (math.log(value) if value > 0.0 else -math.inf)
    points = [(sign * math.log(place), severity) for place, severity in anchors]
    below, severity_below = points[0]
    if position <= below:
        return severity_below
    for place, severity in points[1:]:
        if position < place:
            share = (position - below) / (place - below)
            return severity_below + share * (severity - severity_below)
        below, severity_below = place, severity
    return severity_below
