"""The lag limit in force: the host sets it; a warning and a rollback lower it at once."""

from __future__ import annotations

from vcpo.algo import Rollbacks, WarningLevel
from vcpo.api import VCPORunSpec
from vcpo.control.limit_change import lag_change_sentence, warning_reason
from vcpo.records.step_record import UpdateRecord
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.ledger.changes import LagLimitLeft


class LagLimit:
    """The lag limit for new work and for batches. Owner: the learner's event loop.

    The host owns it: it sees every signal and keeps the history. The learner lowers it by itself
    only while its own early warning throttles it, since the run may be lost before the next poll.
    It never raises it: the limit stays until the host sets another one, also if there is no host.

    No token from before a rollback is trained on: the weights that sampled it are given up. So
    after a rollback the limit grows from 0 by one version with each step, up to what else holds.

    In a redo the ledger is ahead of the parameters. The limit is that of the ledger's version then,
    as the learner that stopped left it, whatever the redone steps say. The ledger holds what was
    left, `left`: write it there after every change.
    """

    def __init__(self, spec: VCPORunSpec) -> None:
        self._bound_steps = spec.algorithm.max_policy_lag_steps
        self._guards = spec.health.guards
        self._level = WarningLevel.OK
        self._set_steps = self._bound_steps
        """By host and warning, without the rollbacks."""
        self._version = 0
        self._rollbacks = Rollbacks()

    @property
    def steps(self) -> int:
        """The limit, in policy versions; at most the run's lag bound."""
        since_rollback = self._rollbacks.largest_lag_steps(self._version)
        return self._set_steps if since_rollback is None else min(self._set_steps, since_rollback)

    def set(self, steps: int) -> int:
        """Set the limit for the host; return what applies: less after a warning or a rollback."""
        self._set_steps = self._warned(min(steps, self._bound_steps))
        return self.steps

    @property
    def left(self) -> LagLimitLeft:
        """What the learner after this one continues with."""
        return LagLimitLeft(steps=self._set_steps, level=self._level, rollbacks=self._rollbacks)

    def resume(
        self,
        left: LagLimitLeft | None,
        level: WarningLevel,
        rollbacks: Rollbacks,
        *,
        version: int,
    ) -> None:
        """Continue a run under the limit that the learner before left.

        left: as the ledger holds it; None if no limit was ever changed.
        level: early warning after the step of the checkpoint.
        rollbacks: of the run up to the checkpoint.
        version: of the checkpoint.
        """
        self._version, self._rollbacks, self._level = version, rollbacks, level
        self.set(self._bound_steps if left is None else left.steps)

    def begin_redo(self, left: LagLimitLeft | None, rollbacks: Rollbacks, *, version: int) -> None:
        """Continue under the limit of the ledger's version, while the steps up to it are redone.

        left: as the ledger holds it.
        rollbacks: of the run up to the checkpoint.
        version: of the ledger. Call `end_redo` when the parameters have it too.
        """
        level = WarningLevel.OK
        if left is not None:
            level = left.level
            if left.rollbacks.number > rollbacks.number:
                rollbacks = left.rollbacks
        self.resume(left, level, rollbacks, version=version)

    def end_redo(self, level: WarningLevel, rollbacks: Rollbacks, *, version: int) -> None:
        """Go on from what was redone.

        level, rollbacks, version: after the last redone step.
        """
        self._level, self._rollbacks, self._version = level, rollbacks, version
        self._set_steps = self._warned(self._set_steps)

    def observe(self, update: UpdateRecord, *, step: int) -> str | None:
        """Take in the early warning of a step; return how it lowered the limit, or None."""
        before, self._level = self._set_steps, WarningLevel(update.warning_level)
        self._version = step
        self._set_steps = self._warned(before)
        if self._set_steps == before:
            return None
        reason = warning_reason(self._level, update.warning_score, step)
        return lag_change_sentence(before, self._set_steps, reason)

    def roll_back(self, rollbacks: Rollbacks, level: WarningLevel) -> None:
        """Take in that the run was rolled back.

        rollbacks: with the new one.
        level: early warning of the state that the run went back to.
        """
        self._rollbacks, self._level = rollbacks, level

    def _warned(self, steps: int) -> int:
        return 0 if self._guards.throttles(self._level) else steps


def left_to_message(left: LagLimitLeft) -> ledger_pb2.LagLimitLeft:
    """Return what a limit was left at as a message."""
    return ledger_pb2.LagLimitLeft(
        steps=left.steps,
        warning_level=left.level,
        rollbacks=left.rollbacks.number,
        rollback_version=left.rollbacks.version,
    )


def left_from_message(message: ledger_pb2.LagLimitLeft) -> LagLimitLeft:
    """Read what `left_to_message` returned.

    Raises:
        ValueError: if there is no such level.
    """
    version = message.rollback_version if message.HasField("rollback_version") else None
    return LagLimitLeft(
        steps=message.steps,
        level=WarningLevel(message.warning_level),
        rollbacks=Rollbacks(number=message.rollbacks, version=version),
    )
