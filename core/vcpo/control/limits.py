"""Bounds and thresholds that a run's spec sets for the control loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from vcpo.algo import GuardPolicy
from vcpo.api import VCPORunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """Bounds of one rollout group."""

    name: str
    min_replicas: int
    """Smallest number of workers, >= 0, also if the learner has more data than it can use."""
    max_replicas: int
    """Largest number of workers, >= max(1, min_replicas)."""

    def clamp(self, replicas: int) -> int:
        """Return the nearest number of replicas within the bounds."""
        return min(max(replicas, self.min_replicas), self.max_replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLimits:
    """Bounds and thresholds of a run's control loop."""

    max_policy_lag_steps: int
    """k, `algorithm.maxPolicyLagSteps`; the lag limit never exceeds it."""
    ess_floor_ratio: float
    """Share of the on-policy ESS ratio, in (0, 1], below which the lag limit is halved."""
    guards: GuardPolicy
    """The run's answers to an early warning; the control loop reads when it throttles."""
    signals_max_age_s: float
    """Age above which signals are ignored."""
    idle_high_ratio: float
    """Share of the time above which a waiting learner counts as starved, in [0, 1]."""
    idle_low_ratio: float
    """Share of the time below which a waiting learner counts as saturated, in [0, 1]."""
    scale_up_cooldown_s: float
    """Shortest time from a change of the replicas to an addition."""
    scale_down_cooldown_s: float
    """Shortest time from a change of the replicas to a removal."""
    groups: tuple[GroupLimits, ...]
    """Rollout groups in the order in which workers are added; at least one."""

    @classmethod
    def of(cls, spec: VCPORunSpec) -> Self:
        """Return the limits that a checked spec sets."""
        control = spec.control
        return cls(
            max_policy_lag_steps=spec.algorithm.max_policy_lag_steps,
            ess_floor_ratio=control.ess_floor_ratio,
            guards=spec.health.guards,
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
        """Return the replicas of every group within its bounds; a missing group gets its minimum.

        If there would be no worker at all, the first group gets one: a run without workers never
        ends, and its starvation is invisible because it takes no step that would measure it.
        """
        fitted = {group.name: group.clamp(replicas.get(group.name, 0)) for group in self.groups}
        if not any(fitted.values()):
            fitted[self.groups[0].name] = 1
        return fitted
