"""The learner of a local run through its restarts: started, found to serve, found to have ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from vcpo.control.run_limits import RunLimits, exceeded_restarts
from vcpo.control.supervision import FailureStreak
from vcpo.local.processes.child import ChildProcess
from vcpo.local.processes.fleet import Fleet, RunFailedError
from vcpo.service.lifecycle import CANNOT_START, DRAINED, Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerEnd:
    """A learner's end."""

    child: ChildProcess
    is_complete: bool
    """Whether the run has ended with it; if not, another is going to be started."""
    message: str = ""
    """How it ended and when the next one starts."""


class LearnerProcess:
    """Keeps one learner running until the run is complete.

    Whoever ends a learner, the host excepted, has not asked the run to end: it is started again.

    resume: whether the first one goes on from a checkpoint; all others do.
    limits: Limits of the run; the restarts among them act here.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        resume: bool,
        limits: RunLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.serves = False
        """Whether the present one has said that it serves."""
        self._fleet = fleet
        self._resume = resume
        self._limits = limits
        self._clock = clock
        self._streak = FailureStreak()
        self._start_at_s: float | None = clock()
        """When the next one is to be started; None while there is one."""

    @property
    def child(self) -> ChildProcess | None:
        """The present one; None when there is none."""
        return None if self._start_at_s is not None else self._fleet.learner

    def start_when_due(self, port: int) -> None:
        """Start one if there is none and its time has come; `port` 0 takes a free one."""
        if self._start_at_s is not None and self._clock() >= self._start_at_s:
            self._fleet.start_learner(resume=self._resume, port=port)
            self._start_at_s = None
            self._resume = True

    def take_ready(self) -> Ready | None:
        """Where it serves, told once for each one that begins to."""
        if self.serves or self.child is None or (ready := self.child.ready) is None:
            return None
        self.serves = True
        return ready

    def take_end(self, *, step: int) -> LearnerEnd | None:
        """Its end, told once for each one that ends, with the next one planned.

        step: steps that are known to have been taken.

        Raises:
            RunFailedError: when starting another would be no cure, or was not, too often.
        """
        child = self.child
        if child is None or child.exit_code is None:
            return None
        if child.exit_code == 0:
            return LearnerEnd(child=child, is_complete=True)
        self.serves = False
        self._streak = self._streak.after_failure(step)
        failures, allowed = self._streak.failures, self._limits.max_learner_restarts
        failure = (
            "was asked to leave by somebody other than this run"
            if child.exit_code == DRAINED
            else child.failure()
        )
        if child.exit_code == CANNOT_START:
            raise RunFailedError(f"the learner {failure}")
        exceeded = exceeded_restarts(self._limits, failures)
        if exceeded is not None:
            raise RunFailedError(f"{exceeded.message} The last time it {failure}")
        self._start_at_s = self._clock() + self._streak.pause_s
        message = f"it {failure}; restart {failures} of {allowed} without progress"
        if self._streak.pause_s:
            message += f", in {self._streak.pause_s:g} s"
        return LearnerEnd(child=child, is_complete=False, message=message)
