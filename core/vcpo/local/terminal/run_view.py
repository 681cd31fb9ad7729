"""The state of a run as people see it: one record for the live view, the panel and `vcpo top`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vcpo.report.numbers import UNKNOWN, decimal, duration, whole

OLD_S = 10.0
"""Age from which numbers are shown with their age, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """State of a run for the live view; None means not known yet."""

    run_name: str
    phase: str
    """`starting`, `restarting`, `silent`, or the phase that the learner reports."""
    step: int
    """Optimizer steps taken."""
    total_steps: int
    reward_mean: float | None
    """Mean reward of recent steps; of a run that is over, of its last step."""
    accuracy: float | None
    """Mean reward of the last evaluation on held-out prompts."""
    ess_ratio: float | None
    """ESS ratio of the last batch, in [1/B, 1]."""
    on_policy_ess_ratio: float | None
    """ESS ratio at lag 0, in (0, 1]."""
    learning_rate_scale: float | None
    """Factor on the base learning rate in the last step, in [0, 1]."""
    lag_p50: int | None
    """Median lag of the last step's tokens, in policy versions."""
    lag_max: int | None
    """Largest lag of the last step's tokens, in policy versions."""
    lag_bound: int
    """Lag above which a trajectory is dropped, in policy versions."""
    admission_lag_steps: int | None = None
    """Lag limit in force, in policy versions; below `lag_bound` the run is throttled."""
    warning_level: str | None = None
    """Early warning of a collapse: ok, warn, critical or dead."""
    warning_score: float | None = None
    """Severity of its worst signal, in [0, 1]."""
    buffered: int
    """Trajectories waiting for the learner."""
    in_flight: int
    """Trajectories being generated."""
    workers_ready: int
    workers_desired: int
    tokens_per_s: float | None
    """Response tokens accepted per second."""
    elapsed_s: float
    eta_s: float | None
    """Estimated seconds to the last step."""
    signals_age_s: float | None = None
    """Age of the learner's signals, in seconds."""
    step_age_s: float | None = None
    """Seconds since the last step ended."""
    signals_max_age_s: float = math.inf
    """Age from which the control loop does not act on signals, in seconds."""
    drain_s: float | None = None
    """Seconds since the learner was asked to save and to end; None if it was not."""
    drain_limit_s: float = math.inf
    """Seconds that it may take."""
    notices: tuple[str, ...] = ()
    """Warnings, one sentence each. The plain view omits them, because events say the same."""

    @property
    def relative_ess_ratio(self) -> float | None:
        """ESS ratio of the last batch as a share of the on-policy one, in [0, 1]."""
        if self.ess_ratio is None or not self.on_policy_ess_ratio:
            return None
        return min(1.0, self.ess_ratio / self.on_policy_ess_ratio)

    @property
    def is_throttled(self) -> bool:
        """Whether the lag limit in force is below that of the spec."""
        return self.admission_lag_steps is not None and self.admission_lag_steps < self.lag_bound

    @property
    def is_lag_broken(self) -> bool:
        """Whether a token older than the spec allows was trained on."""
        return self.lag_max is not None and self.lag_max > self.lag_bound


def lag_text(view: RunView) -> str:
    """Return the lag of the last step and its bound."""
    return f"p50 {whole(view.lag_p50)} max {whole(view.lag_max)} of {view.lag_bound}"


def warning_text(view: RunView) -> str:
    """Return level and score of the early warning."""
    if view.warning_level is None:
        return UNKNOWN
    return f"{printable(view.warning_level)} {decimal(view.warning_score, '.2f')}"


def age_notices(view: RunView) -> list[str]:
    """Return a sentence on the age of the numbers if they are old."""
    if view.signals_age_s is None or view.signals_age_s < OLD_S:
        return []
    age = duration(view.signals_age_s)
    return [f"the learner has not answered for {age}: the numbers are {age} old"]


def drain_notices(view: RunView) -> list[str]:
    """Return a sentence on what an interrupted run waits for, and for how long."""
    if view.drain_s is None:
        return []
    waited, limit = duration(view.drain_s), duration(view.drain_limit_s)
    what = f"finishes step {view.step + 1} if it has begun and saves a checkpoint"
    return [f"waits for the learner, which {what}: {waited} of at most {limit}"]


def printable(text: str) -> str:
    """Replace control characters by spaces, so that a message cannot control the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
