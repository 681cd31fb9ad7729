"""The lag limit in force: the host sets it; a warning and a rollback lower it at once."""

from __future__ import annotations

from collections.abc import Sequence

from vcpo.algo import Rollbacks, WarningLevel
from vcpo.control.limit_change import lag_change_sentence, warning_reason
from vcpo.records.step_record import StepRecord, UpdateRecord
from vcpo.spec import VCPORunSpec


class LagLimit:
    """The lag limit for new work and for batches. Owner: the learner's event loop.

    The host owns it: it sees every signal and keeps the history. The learner lowers it by itself
    only while its own early warning throttles it, since the run may be lost before the next poll.
    It never raises it: the limit stays until the host sets another one, also if there is no host.

    No token from before a rollback is trained on: the weights that sampled it are given up. So
    after a rollback the limit grows from 0 by one version with each step, up to what else holds.

    In a redo the ledger is ahead of the parameters. The limit is that of the ledger's version then,
    as the learner that stopped left it, whatever the redone steps say.
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

    def resume(
        self,
        recorded_steps: Sequence[StepRecord],
        level: WarningLevel,
        rollbacks: Rollbacks,
        *,
        version: int,
    ) -> None:
        """Continue a run under the limit that its newest recorded step left.

        recorded_steps: of the run, by step, also those after the checkpoint.
        level: early warning after the step of the checkpoint.
        rollbacks: of the run up to the checkpoint.
        version: of the checkpoint.
        """
        self._version, self._rollbacks = version, rollbacks
        limit = self._bound_steps
        if recorded_steps:
            # The record holds the limit of the step's batch; its warning has lowered it since.
            newest = recorded_steps[-1]
            self._level = WarningLevel(newest.warning_level)
            limit = self._warned(self._set_before(newest))
        self._level = level
        self.set(limit)

    def begin_redo(
        self, recorded_steps: Sequence[StepRecord], rollbacks: Rollbacks, *, version: int
    ) -> None:
        """Continue under the limit of the ledger's version, while the steps up to it are redone.

        recorded_steps: of the run, by step.
        rollbacks: of the run up to the checkpoint.
        version: of the ledger. Call `end_redo` when the parameters have it too.
        """
        recorded = [one for one in recorded_steps if one.step <= version]
        level = WarningLevel(recorded[-1].warning_level) if recorded else WarningLevel.OK
        newest = max(rollbacks, _recorded_rollbacks(recorded), key=lambda one: one.number)
        self.resume(recorded, level, newest, version=version)

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

    def _set_before(self, record: StepRecord) -> int:
        """Return what was set before a step; the bound if its rollback hides it."""
        since_rollback = self._rollbacks.largest_lag_steps(record.step - 1)
        is_hidden = record.admission_lag_steps == since_rollback
        return self._bound_steps if is_hidden else record.admission_lag_steps


def _recorded_rollbacks(recorded_steps: Sequence[StepRecord]) -> Rollbacks:
    """Return the rollbacks that records tell of."""
    rollbacks = Rollbacks()
    for record in recorded_steps:
        if record.rollbacks > rollbacks.number:
            rollbacks = Rollbacks(number=record.rollbacks, version=record.step)
    return rollbacks
