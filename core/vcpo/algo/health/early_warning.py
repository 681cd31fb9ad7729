"""Early warning of a collapse, from numbers that every step has.

Relative ESS is rho / rho_on; rho alone falls with length, on policy as well. The signals below are
computed over a window of ten steps. The score is the severity of the worst signal, and the level
follows from the score:

    WARN      dips           three steps have a relative ESS of at most 0.2
              lasting loss   the median is at most 0.3
    CRITICAL  bad steps      two steps have at most 0.1 and a KL divergence of 0.1 nat per token;
                             of the first ten steps of a run it takes four
              unbroken loss  every step has at most 0.1
              breakout       during dips divergence is 10 times its median of 50 steps before
    DEAD      death          the median gradient norm is below 1e-5, or the median ESS below 1.5

*Why dips and bad steps in addition to the median.* A run may collapse while its median stays good:
single steps at 0.03 to 0.06, each dominated by one or two trajectories, stand between steps at 0.5
and above. *Why one low step is no signal.* Most runs that do not collapse have one. *Why divergence
counts only if the ESS is low.* Stale samples that the target policy would not draw any more have a
high divergence and no weight. Such a divergence is harmless for hundreds of steps, and it also
multiplies when a run leaves a phase of nearly on-policy steps. *Why a bad step counts half among
the first ten.* An optimizer such as AdamW takes its first steps at full length in every coordinate,
and good runs dip once or twice there; a run that collapses at once has four such steps. *Why one
step never means DEAD.* Runs with an ESS of 1.3 of 64 at one step recovered.

A study measures how far the warning can be trusted (docs/results.md). A low ESS is a necessary
sign of a collapse with weak timing. WARN says that the batches are far off policy; CRITICAL says
that runs have collapsed from such a state.

Sources: VCPO, arXiv 2602.17616 (ESS falls before a collapse). The thresholds are this project's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from vcpo.algo.health.warning_signals import (
    CRITICAL_SCORE,
    LATEST_STEPS,
    WARN_SCORE,
    StepHealth,
    WarningThresholds,
    signal_severities,
)


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
        """Return whether this level is as bad as `other`, or worse."""
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
class EarlyWarning:
    """The last steps of a run and the warning that follows from them; immutable."""

    thresholds: WarningThresholds = field(default_factory=WarningThresholds)
    """Thresholds of the signals."""

    steps: tuple[StepHealth, ...] = ()
    """The remembered steps, oldest first."""

    seen: int = 0
    """Number of steps since the start of the run."""

    def observe(self, step: StepHealth) -> Self:
        """Return the warning after one more step."""
        kept = self.thresholds.trailing_steps + LATEST_STEPS
        return replace(self, steps=(*self.steps, step)[-kept:], seen=self.seen + 1)

    @property
    def score(self) -> float:
        """Severity of the worst signal, in [0, 1]: 1/3 is WARN, 2/3 is CRITICAL, 1 is DEAD."""
        forgotten = self.seen - len(self.steps)
        return max(signal_severities(self.steps, self.thresholds, forgotten).values())

    @property
    def level(self) -> WarningLevel:
        """Level of the score."""
        return warning_level(self.score)

    def to_dict(self) -> dict[str, Any]:
        """Return the observations as JSON values for a checkpoint, without the thresholds."""
        rows = [
            [step.relative_ess, step.ess, step.kl_per_token, step.gradient_norm]
            for step in self.steps
        ]
        return {"steps": rows, "seen": self.seen}

    def restore(self, state: Mapping[str, Any]) -> Self:
        """Return this warning's thresholds with the steps that `to_dict` returned.

        Raises: ValueError if the state has another form or a number is out of range.
        """
        try:
            seen = int(state["seen"])
            steps = [
                StepHealth(relative_ess=rho, ess=ess, kl_per_token=kl, gradient_norm=norm)
                for rho, ess, kl, norm in state["steps"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"state is {str(state)[:80]}: give what to_dict of EarlyWarning returned"
            ) from error
        kept = self.thresholds.trailing_steps + LATEST_STEPS
        return replace(self, steps=tuple(steps[-kept:]), seen=seen)
