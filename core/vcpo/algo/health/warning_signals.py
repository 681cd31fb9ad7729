"""How severe each sign of a collapse is in the last steps of a run; `early_warning` judges by it.

Every signal is a number of the window and its severity, linear in the number's logarithm between
thresholds: 0 is well, 1/3 is the threshold of a warning, 2/3 that of a critical state, 1 is death.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Final

WARN_SCORE: Final = 1 / 3
"""Severity of a signal at its threshold of warning."""

CRITICAL_SCORE: Final = 2 / 3
"""Severity of a signal at its critical threshold."""

LATEST_STEPS: Final = 3
"""Steps whose median divergence is held against the trailing ones; one may be a freak."""

_WORST_WARNING: Final = 0.6
_WORST_ALIVE: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class WarningThresholds:
    """Where each signal begins to speak."""

    window_steps: int = 10
    """Steps that are looked at together, at least 3."""

    trailing_steps: int = 50
    """Steps before the last three that a breakout is measured against, at least a window."""

    lasting_relative_ess: float = 0.3
    """Median relative ESS of a full window at or below which to warn, in (0, 1)."""

    dip_relative_ess: float = 0.2
    """Relative ESS, in (0, 1), that steps of the window at or below warn by ..."""

    dip_steps: int = 3
    """... when there are so many of them, at least 1 and at most the window."""

    bad_relative_ess: float = 0.1
    """Relative ESS, in (0, 1), at or below which a step with a high divergence is bad; a full
    window without a step above it is critical."""

    bad_kl_per_token: float = 0.1
    """KL divergence, nats per token, at or above which a step with a low ESS is bad; 0 asks for the
    ESS alone."""

    bad_steps: int = 2
    """Bad steps in the window at which the state is critical, at least 1 and at most the window."""

    early_steps: int = 10
    """First steps of a run, at least 0, among which a bad step counts half."""

    kl_breakout: float = 10.0
    """Times its trailing median at which the divergence is critical, above 1, during dips."""

    kl_floor: float = 1e-3
    """KL divergence, nats per token, above 0, below which there is no breakout."""

    dead_gradient_norm: float = 1e-5
    """Median gradient norm of a full window below which a run is dead."""

    dead_ess: float = 1.5
    """Median effective sample size, in trajectories, below which a run is dead."""

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
                raise ValueError(f"{name} is {getattr(self, name)}: give a part in (0, 1)")
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
    """What the warning needs to know of one step."""

    relative_ess: float
    """rho / rho_on before truncation, at least 0; 0 when a weight has no value."""

    ess: float | None = None
    """Effective sample size, in trajectories; None when it is not known."""

    kl_per_token: float | None = None
    """KL divergence from sampler to learner, nats per token, at least 0; None when not known, which
    counts as high in a step whose ESS is low."""

    gradient_norm: float | None = None
    """Before clipping, at least 0; None when not known, or when nothing is left to be learned."""

    def __post_init__(self) -> None:
        for name in ("relative_ess", "ess", "kl_per_token", "gradient_norm"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < math.inf:
                raise ValueError(f"{name} is {value}: give a finite number, 0 or above")


def signal_severities(
    steps: Sequence[StepHealth], thresholds: WarningThresholds, forgotten: int = 0
) -> dict[str, float]:
    """Severity of every signal, in [0, 1], by name; 0 of those that need more steps.

    steps: of one run, oldest first; forgotten: steps of it that came before them.
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
    """Of the lowest steps, as many as it takes: the best one."""
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
    """0 until there are enough steps that are low in ESS and high in divergence at once.

    num_early: first steps of the window of which a bad one counts half.
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
    """0 while any step of the window is above the threshold."""
    best = max((step.relative_ess for step in window), default=math.inf)
    threshold = thresholds.bad_relative_ess
    if len(window) < thresholds.window_steps or best > threshold:
        return 0.0
    return _severity(best, (threshold, CRITICAL_SCORE), (threshold / 10, _WORST_ALIVE))


def _breakout(steps: Sequence[StepHealth], thresholds: WarningThresholds) -> float:
    """0 until the latest divergence is far above the one before it."""
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
    """1 when most steps of a full window have no gradient, or no sample, to speak of."""
    if len(window) < thresholds.window_steps:
        return 0.0
    norms = [math.inf if step.gradient_norm is None else step.gradient_norm for step in window]
    sizes = [math.inf if step.ess is None else step.ess for step in window]
    is_dead = median(norms) < thresholds.dead_gradient_norm or median(sizes) < thresholds.dead_ess
    return 1.0 if is_dead else 0.0


def _severity(value: float, *anchors: tuple[float, float]) -> float:
    """Severity of a value, linear in its logarithm between anchors (value, severity).

    The anchors' severities rise; their values all rise or all fall. Beyond the ends it is theirs.
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
