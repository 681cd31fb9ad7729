"""What a run's specification allows the control loop to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from vcpo.spec import VCPORunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """Bounds of one rollout group."""

    name: str
    min_replicas: int
    """Workers kept even when the learner has more data than it can use, >= 0."""
    max_replicas: int
    """Workers at most, >= max(1, min_replicas)."""

    def clamp(self, replicas: int) -> int:
        """Nearest number of replicas within the bounds."""
        return min(max(replicas, self.min_replicas), self.max_replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds and thresholds of a run's control; made from a checked spec by `Limits.of`."""

    max_admission_lag_steps: int
    """k, the lag bound of the algorithm, in policy versions; admission never exceeds it."""
    ess_floor_ratio: float
    """Share of the on-policy ESS ratio, in (0, 1], under which admission tightens."""
    signals_max_age_s: float
    """Signals older than this change nothing."""
    idle_high_ratio: float
    """The learner starves when it waits for data more than this share of the time."""
    idle_low_ratio: float
    """The learner is saturated when it waits less than this share of the time."""
    scale_up_cooldown_s: float
    """Least time between a change of the replicas and an addition."""
    scale_down_cooldown_s: float
    """Least time between a change of the replicas and a removal."""
    groups: tuple[GroupLimits, ...]
    """Rollout groups in the order in which they are filled; at least one."""

    @classmethod
    def of(cls, spec: VCPORunSpec) -> Self:
        """Limits of a run."""
        control = spec.control
        return cls(
            max_admission_lag_steps=spec.algorithm.max_policy_lag_steps,
            ess_floor_ratio=control.ess_floor_ratio,
            signals_max_age_s=control.signals_max_age_seconds,
            idle_high_ratio=control.idle_high_ratio,
            idle_low_ratio=control.idle_low_ratio,
            scale_up_cooldown_s=control.scale_up_cooldown_seconds,
            scale_down_cooldown_s=control.scale_down_cooldown_seconds,
            groups=tuple(
                GroupLimits(
                    name=group.name,
                    min_replicas=group.min_replicas,
                    max_replicas=group.max_replicas,
                )
                for group in spec.rollouts
            ),
        )

    def fit(self, replicas: Mapping[str, int]) -> dict[str, int]:
        """Replicas of every group within its bounds; a group without an entry gets its minimum.

        The first group gets a worker when there would be none at all: a run that nobody generates
        for neither ends nor starves visibly, since it takes no more steps to measure.
        """
        fitted = {group.name: group.clamp(replicas.get(group.name, 0)) for group in self.groups}
        if not any(fitted.values()):
            fitted[self.groups[0].name] = 1
        return fitted
