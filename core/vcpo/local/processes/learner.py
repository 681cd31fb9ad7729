"""The learner of a local run across its restarts."""

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
    """The end of a learner process."""

    child: ChildProcess
    is_complete: bool
    """Whether the run is complete; otherwise the learner will be restarted."""
    message: str = ""
    """How it ended, and when it will be restarted."""


class LearnerProcess:
    """Keeps one learner running until the run is complete.

    A learner that anything but this host stops is restarted.

    resume: whether the first process resumes from a checkpoint; every later one does.
    limits: limits of the run, of which this class applies the restarts.
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
        """Whether the current process has reported that it serves."""
        self._fleet = fleet
        self._resume = resume
        self._limits = limits
        self._clock = clock
        self._streak = FailureStreak()
        self._start_at_s: float | None = clock()
        """When to start the next process; None while one exists."""

    @property
    def child(self) -> ChildProcess | None:
        """The current process; None between two processes."""
        return None if self._start_at_s is not None else self._fleet.learner

    def start_when_due(self, port: int) -> None:
        """Start a process if there is none and the pause is over; port 0 takes a free port."""
        if self._start_at_s is not None and self._clock() >= self._start_at_s:
            self._fleet.start_learner(resume=self._resume, port=port)
            self._start_at_s = None
            self._resume = True

    def take_ready(self) -> Ready | None:
        """Return the ports of a process that began to serve, once per process; else None."""
        if self.serves or self.child is None or (ready := self.child.ready) is None:
            return None
        self.serves = True
        return ready

    def take_end(self, *, step: int) -> LearnerEnd | None:
        """Return the end of a process, once per process, and schedule the next; else None.

        step: largest number of steps known to have been taken.

        Raises:
            RunFailedError: if the learner reports a start error or exceeded its restarts.
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
            "was stopped from outside this run"
            if child.exit_code == DRAINED
            else child.describe_failure()
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
