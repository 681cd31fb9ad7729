"""Failed generations: their counts, and when there are too many in a row.

If the environment has never worked, its author made a mistake: the run ends after
`failurePolicy.maxFailuresInARow` failures. If it worked before, it may depend on a service that is
down for a while, such as a reward server: the failures must also last `failureToleranceSeconds`.
"""

from __future__ import annotations

from collections import deque

from vcpo.spec import VCPORunSpec
from vcpo.wire.failures import Failure, FailureCount, FailureCounts
from vcpo_learner.clock import Clock

_MAX_EVENT_LINES = 64


class TooManyFailuresError(RuntimeError):
    """Every generation fails; the message says why and what to do."""


class FailureWatch:
    """Counts failed generations and decides when the run ends. Owner: the learner's event loop."""

    def __init__(self, spec: VCPORunSpec, clock: Clock) -> None:
        self.in_a_row = 0
        """Failures since the last accepted trajectory."""
        self._environment = spec.environment.name
        self._policy = spec.failure_policy
        self._clock = clock
        self._counts = FailureCounts()
        self._has_succeeded = False
        self._row_began_s = 0.0
        self._latest: Failure | None = None
        self._event_lines: deque[str] = deque(maxlen=_MAX_EVENT_LINES)

    @property
    def counts(self) -> list[FailureCount]:
        """The distinct failures, the latest first."""
        return list(self._counts)

    def record_success(self) -> None:
        """Record an accepted trajectory, or that the run had some before this process started."""
        self._has_succeeded = True
        self.in_a_row = 0

    def record_failure(self, failure: Failure) -> None:
        """Record a failed generation."""
        now_s = self._clock()
        if self.in_a_row == 0:
            self._row_began_s = now_s
        self.in_a_row += 1
        self._latest = failure
        if (line := self._counts.add(failure, now_s=now_s)) is not None:
            self._event_lines.append(self._with_environment(line, failure))

    def take_event_lines(self) -> list[str]:
        """Return the lines for events since the last call."""
        lines = list(self._event_lines)
        self._event_lines.clear()
        return lines

    def check(self) -> None:
        """Check whether the run can continue.

        Raises:
            TooManyFailuresError: if there were too many failures in a row, for too long.
        """
        if self._latest is None or self.in_a_row < self._policy.max_failures_in_a_row:
            return
        lasted_s = self._clock() - self._row_began_s
        if self._has_succeeded and lasted_s < self._policy.failure_tolerance_seconds:
            return
        raise TooManyFailuresError(
            f"{self.in_a_row} generations in a row failed; the last one:"
            f" {self._with_environment(self._latest.sentence, self._latest)}. Fix the cause and"
            " start the run again; spec.failurePolicy.maxFailuresInARow sets how many are allowed"
        )

    def _with_environment(self, line: str, failure: Failure) -> str:
        """Put the environment's name before a line if the environment caused the failure."""
        if not failure.cause.is_of_environment:
            return line
        return f"environment '{self._environment}': {line}"
