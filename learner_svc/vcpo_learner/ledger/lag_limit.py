"""The lag limit of a run: the host sets it; a warning and a rollback lower it at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.algo.health.guards import GuardPolicy, Rollbacks
from vcpo.wire.v1 import ledger_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class LagLimit:
    """What host, early warning and rollbacks leave of `maxPolicyLagSteps`. The ledger holds it.

    The host owns it: it sees every signal and keeps the history. The learner lowers it by itself
    only while its own early warning throttles it, since the run may be lost before the next poll.
    It never raises it: the limit stays until the host sets another one, also if there is no host.

    No token from before a rollback is trained on: the weights that sampled it are given up. So
    after a rollback the limit grows from 0 by one step with each step, up to what else holds.
    """

    steps: int
    """Limit of host and warning, in steps."""
    level: WarningLevel = WarningLevel.OK
    """Early warning after the newest step."""
    rollbacks: Rollbacks = field(default_factory=Rollbacks)

    def in_force(self, step: int) -> int:
        since_rollback = self.rollbacks.largest_lag_steps(step)
        return self.steps if since_rollback is None else min(self.steps, since_rollback)

    def set_by_host(self, steps: int, guards: GuardPolicy) -> Self:
        return replace(self, steps=0 if guards.answers(self.level) else steps)

    def after_step(
        self, level: WarningLevel, rollbacks: Rollbacks, guards: GuardPolicy
    ) -> LagLimit:
        steps = 0 if guards.answers(level) else self.steps
        return LagLimit(steps=steps, level=level, rollbacks=rollbacks)


def limit_to_message(limit: LagLimit) -> ledger_pb2.LagLimit:
    """Return a limit as a message."""
    return ledger_pb2.LagLimit(
        steps=limit.steps,
        warning_level=limit.level,
        rollbacks=limit.rollbacks.number,
        rollback_step=limit.rollbacks.version,
    )


def limit_from_message(message: ledger_pb2.LagLimit) -> LagLimit:
    """Read what `limit_to_message` returned."""
    version = message.rollback_step if message.HasField("rollback_step") else None
    return LagLimit(
        steps=message.steps,
        level=WarningLevel(message.warning_level),
        rollbacks=Rollbacks(number=message.rollbacks, version=version),
    )
