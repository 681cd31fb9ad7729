"""A fake of the operator's connections to learners."""

from __future__ import annotations

from dataclasses import replace

from vcpo.control.signals import RunSignals
from vcpo.wire.access.tls import Trust
from vcpo.wire.phase import RunPhase
from vcpo_operator.decisions.plan import Drain, ReleaseLeases, Throttle
from vcpo_operator.names import RunKey
from vcpo_operator.observed.parse import LearnerAccess
from vcpo_operator.signals.client import LearnerConnections


class FakeConnections(LearnerConnections):
    """Every learner returns `signals`; the commands that the operator sends are recorded."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: 0.0)
        self.signals: RunSignals | None = None
        self.throttles: list[int] = []
        self.reasons: list[str] = []
        """Why each throttle was sent."""
        self.steering_keys: dict[RunKey, str] = {}
        self.trusts: dict[RunKey, Trust | None] = {}
        self.drains: list[str] = []
        self.in_flight_after_drain: int = 0
        """Trajectories still in flight once a learner drains."""

    async def set_access(self, key: RunKey, access: LearnerAccess | None) -> None:
        if access is not None:
            self.steering_keys[key], self.trusts[key] = access.steering_key, access.trust

    async def fetch_signals(self, key: RunKey, *, period_s: float) -> RunSignals | None:
        return self.signals

    async def send(self, key: RunKey, command: Throttle | Drain | ReleaseLeases) -> None:
        """Record the command; after a drain the signals say that the learner drains."""
        if isinstance(command, Throttle):
            self.throttles.append(command.lag_limit_steps)
            self.reasons.append(command.reason)
        if isinstance(command, Drain):
            self.drains.append(command.reason)
            if self.signals is not None:
                self.signals = replace(
                    self.signals, in_flight=self.in_flight_after_drain, phase=RunPhase.DRAINING
                )

    async def disconnect(self, key: RunKey) -> None:
        """Do nothing: nothing is connected."""
