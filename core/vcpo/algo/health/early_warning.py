"""Early warning of a collapse, from the numbers that every step has anyway.

Relative ESS is rho / rho_on: the ratio alone falls with length, on policy too. In a window of ten
steps the signals are these; the score is the worst one's severity, and the level follows from it:

    WARN      dips           three steps have a relative ESS of at most 0.2
              lasting loss   the median is at most 0.3
    CRITICAL  bad steps      two steps have at most 0.1 and a KL divergence of 0.1 nat per token;
                             of the first ten steps of a run it takes four
              unbroken loss  every step has at most 0.1
              breakout       during dips divergence is 10 times its median of 50 steps before
    DEAD      death          the median gradient norm is below 1e-5, or the median ESS below 1.5

*Why dips and bad steps beside the median.* A run may fall with a median that never looked bad:
steps at 0.03 to 0.06 stand alone between others at 0.5 and above, each taken along one or two
trajectories. *Why the lowest step alone is no signal.* Most runs that hold have one somewhere.
*Why divergence only counts where the ESS is low.* Stale samples that the learner would not draw any
more are far away and weigh nothing: divergence is high and harmless for hundreds of steps, and it
multiplies whenever a run that was nearly on policy moves on. *Why a bad step counts half among the
first ten.* An optimizer such as AdamW takes its first steps at full length in every coordinate, and
runs that go well dip there once or twice; what falls at once has four such steps all the same. *Why
nobody is dead for one step.* Runs were seen at an ESS of 1.3 of 64 and went on.

A study measures how far to trust it (`results/alarms`). A low ESS is a necessary sign with weak
timing: WARN says that steps are far from the data that they are made of, CRITICAL that runs have
fallen so.

Sources: VCPO, arXiv 2602.17616 (ESS falls before a collapse). The thresholds are this project's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from vcpo.algo.ess.moments import entry
from vcpo.algo.health.warning_signals import (
    CRITICAL_SCORE,
    LATEST_STEPS,
    WARN_SCORE,
    StepHealth,
    WarningThresholds,
    signal_severities,
)


class WarningLevel(StrEnum):
    """How a run is doing, from good to bad."""

    OK = "ok"
    WARN = "warn"
    """Steps are far from the data that they are made of: look at the lag."""
    CRITICAL = "critical"
    """As runs are shortly before they fall: lower the lag or the learning rate."""
    DEAD = "dead"
    """Nothing is learned any more: go back to a checkpoint."""

    def is_at_least(self, other: "WarningLevel") -> bool:
        """Whether this level is as bad as another, or worse."""
        order = list(WarningLevel)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyWarning:
    """The last steps of a run and what they bode; immutable."""

    thresholds: WarningThresholds = field(default_factory=WarningThresholds)
    """Where each signal begins to speak."""

    steps: tuple[StepHealth, ...] = ()
    """The steps still remembered, oldest first."""

    seen: int = 0
    """Steps seen since the start of the run."""

    def observe(self, step: StepHealth) -> Self:
        """Warning that has also seen a step."""
        kept = self.thresholds.trailing_steps + LATEST_STEPS
        return replace(self, steps=(*self.steps, step)[-kept:], seen=self.seen + 1)

    @property
    def score(self) -> float:
        """The worst signal's severity, in [0, 1]: 1/3 warns, 2/3 is critical, 1 is dead."""
        forgotten = self.seen - len(self.steps)
        return max(signal_severities(self.steps, self.thresholds, forgotten).values())

    @property
    def level(self) -> WarningLevel:
        """The score, in words."""
        score = self.score
        if score >= 1.0:
            return WarningLevel.DEAD
        if score >= CRITICAL_SCORE:
            return WarningLevel.CRITICAL
        return WarningLevel.WARN if score >= WARN_SCORE else WarningLevel.OK

    def to_dict(self) -> dict[str, Any]:
        """What was observed, as plain JSON values for a checkpoint; settings are not part of it."""
        rows = [
            [step.relative_ess, step.ess, step.kl_per_token, step.gradient_norm]
            for step in self.steps
        ]
        return {"steps": rows, "seen": self.seen}

    def restore(self, state: Mapping[str, Any]) -> Self:
        """This warning's thresholds with the steps that `to_dict` returned.

        Raises: ValueError when the state has another form or holds an impossible step.
        """
        rows = entry(state, "steps", "EarlyWarning")
        seen = entry(state, "seen", "EarlyWarning")
        try:
            seen = int(seen)
            steps = [
                StepHealth(relative_ess=rho, ess=ess, kl_per_token=kl, gradient_norm=norm)
                for rho, ess, kl, norm in rows
            ]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"state is {str(state)[:80]}: give what to_dict of EarlyWarning returned"
            ) from error
        kept = self.thresholds.trailing_steps + LATEST_STEPS
        return replace(self, steps=tuple(steps[-kept:]), seen=seen)
