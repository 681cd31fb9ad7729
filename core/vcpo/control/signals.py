"""The signals of a run that the control loop decides on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from vcpo.algo import WarningLevel

WINDOW_STEPS = 10
"""Number of recent steps in the learner's window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSignals:
    """Signals of a run at one moment; None if the learner has not measured the value yet.

    Raises: ValueError naming the field that is out of range or not finite. A caller that reads
    signals from outside treats this as no signals, so invalid signals change nothing.
    """

    step: int
    """Optimizer steps taken, >= 0."""
    policy_version: int
    """The learner's policy version, >= 0."""
    ess_ratio_mean: float | None
    """Mean ESS ratio over the window of recent steps, in [0, 1]."""
    ess_ratio_low: float | None = None
    """Low percentile of the ESS ratio over the same window, in [0, 1]."""
    on_policy_ess_ratio: float
    """ESS ratio at lag 0, in (0, 1]; the reference of the other two."""
    warning_score: float | None = None
    """Early warning of a collapse after the last step: severity of the worst signal, in [0, 1]."""
    warning_level: WarningLevel | None = None
    """Level of the early warning after the last step."""
    rollback: str = ""
    """From which step to which checkpoint the run was rolled back in the last steps, and why, as a
    clause; empty if it was not."""
    lag_p50: int | None
    """Median lag of the tokens of the last step, in policy versions, >= 0."""
    lag_max: int | None = None
    """Largest lag of a token of the last step, in policy versions, >= 0."""
    buffered: int
    """Trajectories that wait for training, >= 0."""
    in_flight: int
    """Trajectories that workers are generating, >= 0."""
    batch_trajectories: int
    """Trajectories consumed by one optimizer step, >= 1."""
    admission_lag_steps: int
    """Lag limit that the learner applies to new work now, in policy versions, >= 0."""
    learner_idle_ratio: float
    """Share of the window in which the learner waited for data, in [0, 1]."""
    produced_per_s: float = 0.0
    """Trajectories accepted per second, >= 0; only reported."""
    consumed_per_s: float = 0.0
    """Trajectories trained on per second, >= 0; only reported."""
    ready_workers: Mapping[str, int] = field(default_factory=dict)
    """Registered workers by rollout group; a group without an entry has none."""
    age_s: float = 0.0
    """Seconds since the learner reported this, >= 0."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and item.name not in _NOT_NUMBERS:
                _require_range(item.name, value)
        for group, workers in self.ready_workers.items():
            if workers < 0:
                raise ValueError(f"ready_workers['{group}'] must be at least 0, not {workers}")

    @property
    def relative_ess_ratio(self) -> float | None:
        """Mean ESS ratio as a share of the on-policy one, in [0, 1]."""
        return self._relative(self.ess_ratio_mean)

    @property
    def relative_ess_ratio_low(self) -> float | None:
        """Low percentile of the ESS ratio as a share of the on-policy one, in [0, 1]."""
        return self._relative(self.ess_ratio_low)

    @property
    def outstanding(self) -> int:
        """Trajectories that are leased or buffered."""
        return self.buffered + self.in_flight

    def _relative(self, ess_ratio: float | None) -> float | None:
        return None if ess_ratio is None else min(1.0, ess_ratio / self.on_policy_ess_ratio)


_NOT_NUMBERS = {"ready_workers", "warning_level", "rollback"}
_SHARES = {
    "ess_ratio_mean",
    "ess_ratio_low",
    "on_policy_ess_ratio",
    "warning_score",
    "learner_idle_ratio",
}


def _require_range(name: str, value: float) -> None:
    if name in _SHARES:
        inside, allowed = 0.0 <= value <= 1.0, "in [0, 1]"
    else:
        inside, allowed = 0 <= value < math.inf, "at least 0 and finite"
    if not inside:
        raise ValueError(f"{name} must be {allowed}, not {value}")
    if value == 0 and name in {"on_policy_ess_ratio", "batch_trajectories"}:
        raise ValueError(f"{name} must be above 0, not {value}")
