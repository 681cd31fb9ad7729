"""Failed generations as the learner hears of them, and when there are too many in a row.

An environment that never worked is a mistake of whoever wrote it: the run ends after
`failurePolicy.maxFailuresInARow` failures. One that did work may need something that is away for a
while, such as a reward server: its failures must also last `failureToleranceSeconds`.
"""

from __future__ import annotations

from collections import deque

from vcpo.spec import VCPORunSpec
from vcpo.wire.failures import Failure, FailureCount, FailureCounts
from vcpo_learner.ledger.leases import Clock

_MAX_NEWS = 64


class TooManyFailuresError(RuntimeError):
    """Nothing is answered any more; the message says why, and what to do."""


class FailureWatch:
    """Counts failures and judges them. Owner: the learner's event loop."""

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
        self._news: deque[str] = deque(maxlen=_MAX_NEWS)

    @property
    def counts(self) -> list[FailureCount]:
        """The distinct failures, the latest first."""
        return list(self._counts)

    def record_success(self) -> None:
        """Note an accepted trajectory, or a run that had some before this process."""
        self._has_succeeded = True
        self.in_a_row = 0

    def record_failure(self, failure: Failure) -> None:
        """Note a failed generation."""
        now_s = self._clock()
        if self.in_a_row == 0:
            self._row_began_s = now_s
        self.in_a_row += 1
        self._latest = failure
        if (line := self._counts.add(failure, now_s=now_s)) is not None:
            self._news.append(self._named(line, failure))

    def take_event_lines(self) -> list[str]:
        """Lines worth an event that were not taken before."""
        news = list(self._news)
        self._news.clear()
        return news

    def check(self) -> None:
        """Judge the failures so far.

        Raises: TooManyFailuresError when the run is not worth going on with.
        """
        if self._latest is None or self.in_a_row < self._policy.max_failures_in_a_row:
            return
        lasted_s = self._clock() - self._row_began_s
        if self._has_succeeded and lasted_s < self._policy.failure_tolerance_seconds:
            return
        raise TooManyFailuresError(
            f"{self.in_a_row} generations in a row failed, the last by"
            f" {self._named(self._latest.sentence, self._latest)}. Put that right and start again;"
            " spec.failurePolicy.maxFailuresInARow says how many are allowed"
        )

    def _named(self, line: str, failure: Failure) -> str:
        if not failure.cause.is_of_environment:
            return line
        return f"environment '{self._environment}': {line}"
