"""The lag limit in force: the host sets it, and an early warning lowers it at once."""

from __future__ import annotations

from collections.abc import Sequence

from vcpo.algo import WarningLevel
from vcpo.control.limit_change import lag_change_sentence, warning_reason
from vcpo.control.throttle import warned_lag_steps
from vcpo.records.step_record import StepRecord, UpdateRecord
from vcpo.spec import VCPORunSpec


class LagLimit:
    """The lag limit for new work and for batches. Owner: the learner's event loop.

    The host owns it: it sees every signal and keeps the history. The learner lowers it by itself
    only while its own early warning is critical, since the run may be lost before the next poll. It
    never raises it: the limit stays until the host sets another one, also if there is no host.
    """

    def __init__(self, spec: VCPORunSpec) -> None:
        self._bound_steps = spec.algorithm.max_policy_lag_steps
        self._throttles_on_critical = spec.control.on_critical.throttles
        self._level = WarningLevel.OK
        self._steps = self._bound_steps

    @property
    def steps(self) -> int:
        """The limit, in policy versions; at most the run's lag bound."""
        return self._steps

    def set(self, steps: int) -> int:
        """Set the limit for the host; return what applies: less during a critical warning."""
        self._steps = self._warned(min(steps, self._bound_steps))
        return self._steps

    def resume(self, recorded_steps: Sequence[StepRecord], level: WarningLevel) -> None:
        """Continue a run under the limit that its newest recorded step left.

        recorded_steps: of the run, by step, also those after the checkpoint.
        level: early warning after the step of the checkpoint.
        """
        limit = self._bound_steps
        if recorded_steps:
            # The record holds the limit of the step's batch; its warning has lowered it since.
            newest = recorded_steps[-1]
            self._level = WarningLevel(newest.warning_level)
            limit = self._warned(newest.admission_lag_steps)
        self._level = level
        self.set(limit)

    def observe(self, update: UpdateRecord, *, step: int) -> str | None:
        """Take in the early warning of a step; return how it lowered the limit, or None."""
        before, self._level = self._steps, WarningLevel(update.warning_level)
        self._steps = self._warned(before)
        if self._steps == before:
            return None
        reason = warning_reason(self._level, update.warning_score, step)
        return lag_change_sentence(before, self._steps, reason)

    def _warned(self, steps: int) -> int:
        return warned_lag_steps(steps, self._level) if self._throttles_on_critical else steps
