"""State that the control loop keeps from one decision to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from vcpo.control.limits import ControlLimits, LimitChange
from vcpo.control.scaling import FleetState
from vcpo.control.throttle import ThrottleState


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """The part of a decision's input that earlier decisions determine."""

    throttle: ThrottleState
    fleet: FleetState
    last_lag_change: LimitChange | None = None
    """The newest change of the lag limit, which explains the limit in force."""

    @classmethod
    def start(
        cls,
        limits: ControlLimits,
        *,
        now_s: float,
        replicas: Mapping[str, int] | None = None,
        lag_limit_steps: int | None = None,
    ) -> Self:
        """Return the state before the first decision.

        now_s: time on the clock of the decisions; the cool-downs start now.
        replicas: existing workers by rollout group; None starts each group at its minimum.
        lag_limit_steps: lag limit in force; None starts at `algorithm.maxPolicyLagSteps`.
        """
        most = limits.max_policy_lag_steps
        lag = most if lag_limit_steps is None else min(lag_limit_steps, most)
        return cls(
            throttle=ThrottleState(lag_limit_steps=lag),
            fleet=FleetState(replicas=limits.fit(replicas or {}), scaled_s=now_s),
        )

    def fit(self, limits: ControlLimits, now_s: float) -> ControlState:
        """Return this state within the limits; no time in it is later than `now_s`."""
        starvation = self.fleet.starvation
        if starvation is not None:
            seen_s = min(starvation.seen_s, now_s)
            starvation = dataclasses.replace(starvation, seen_s=seen_s)
        fleet = dataclasses.replace(
            self.fleet,
            replicas=limits.fit(self.fleet.replicas),
            scaled_s=min(self.fleet.scaled_s, now_s),
            starvation=starvation,
        )
        throttle = self.throttle.clamp(limits.max_policy_lag_steps)
        return dataclasses.replace(self, throttle=throttle, fleet=fleet)
