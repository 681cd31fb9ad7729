"""The learner of a local run across its restarts: one process, or several ranks as one group."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vcpo.api import VCPORunSpec
from vcpo.control.run_limits import FailureStreak, exceeded_restarts
from vcpo.local.processes.child import ChildProcess, first_failure
from vcpo.local.processes.fleet import Fleet, RunFailedError
from vcpo.service.lifecycle import CANNOT_START, DRAINED, Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerEnd:
    """The end of the learner's processes."""

    child: ChildProcess
    """The rank that ended first; the others were stopped."""
    is_complete: bool
    """Whether the run is complete; otherwise the learner will be restarted."""
    message: str = ""
    """How it ended, and when it will be restarted."""


class LearnerProcess:
    """Keeps one learner running until the run is complete.

    A learner that anything but this host stops is restarted. If one of several ranks fails, the
    others are killed: they cannot continue. All start again, from the last checkpoint.

    resume: whether the first start resumes from a checkpoint; every later one does.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        resume: bool,
        spec: VCPORunSpec,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.serves = False
        """Whether rank 0 of the current start has reported that it serves."""
        self._fleet = fleet
        self._resume = resume
        self._spec = spec
        self._clock = clock
        self._streak = FailureStreak()
        self._start_at_s: float | None = clock()
        """Time of the next start; None while the learner runs."""

    @property
    def ranks(self) -> Sequence[ChildProcess]:
        return () if self._start_at_s is not None else self._fleet.learner_ranks

    def start_when_due(self, port: int) -> None:
        """Start, to serve on a port, if nothing of the last start runs and the pause is over."""
        if self._start_at_s is None or self._clock() < self._start_at_s:
            return
        if any(child.exit_code is None for child in self._fleet.learner_ranks):
            return  # a killed rank still holds memory, on its GPU as well
        self._fleet.start_learner(resume=self._resume, port=port)
        self._start_at_s = None
        self._resume = True

    def take_ready(self) -> Ready | None:
        """Return the ports of a rank 0 that began to serve, once per start; else None."""
        if self.serves or not self.ranks or (ready := self.ranks[0].ready) is None:
            return None
        self.serves = True
        return ready

    def take_end(self, *, step: int) -> LearnerEnd | None:
        """Return the end of the learner, once per start, and schedule the next; else None.

        step: largest number of steps known to have been taken.

        Raises:
            RunFailedError: if the learner reports a start error or exceeded its restarts.
        """
        ranks = self.ranks
        if ranks and ranks[0].exit_code == 0:
            return LearnerEnd(child=ranks[0], is_complete=True)
        failed = first_failure(ranks)
        if failed is None:
            return None
        for other in ranks:
            other.kill()
        child = ranks[failed]
        it = "it" if len(ranks) == 1 else f"rank {failed}"
        self.serves = False
        self._streak = self._streak.after_failure(step)
        failures, allowed = self._streak.failures, self._spec.failure_policy.max_learner_restarts
        failure = (
            "was stopped from outside this run"
            if child.exit_code == DRAINED
            else child.describe_failure()
        )
        if child.exit_code == CANNOT_START:
            raise RunFailedError(f"{'the learner' if it == 'it' else it} {failure}")
        exceeded = exceeded_restarts(self._spec, failures)
        if exceeded is not None:
            raise RunFailedError(f"{exceeded.message} The last time {it} {failure}")
        self._start_at_s = self._clock() + self._streak.pause_s
        message = f"{it} {failure}; restart {failures} of {allowed} without progress"
        if self._streak.pause_s:
            message += f", in {self._streak.pause_s:g} s"
        return LearnerEnd(child=child, is_complete=False, message=message)
