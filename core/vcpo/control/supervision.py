"""Supervision of processes: when a failed process is restarted, and when a process is hung.

Only progress ends a streak of failures. Time does not: a process that starts for minutes and then
dies crash-loops just like a process that dies after a second.
"""

from __future__ import annotations

from dataclasses import dataclass

SILENCE_DEADLINE_S = 60.0
"""Seconds without an answer after which a process is hung; the pods' liveness probes agree."""

MAX_WORKER_FAILURES = 5
"""Number of workers in a row that end before they submit anything, after which the run fails; it
does not fail while another worker that has submitted is running."""

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureStreak:
    """Number of failures in a row without progress between them."""

    failures: int = 0
    progress: int = 0
    """Largest progress at any failure so far, such as steps taken. Work that is repeated after a
    failure, such as steps since the checkpoint, is no progress."""

    def after_failure(self, progress: int) -> FailureStreak:
        """Return the streak after one more failure.

        progress: the largest progress reached by now, in the unit of the field.
        """
        if progress > self.progress:
            return FailureStreak(failures=1, progress=progress)
        return FailureStreak(failures=self.failures + 1, progress=self.progress)

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next start: 0, then 1, 2, 4 and so on up to 60."""
        if self.failures <= 1:
            return 0.0
        # The exponent is bounded, because a long streak would overflow a float.
        doublings = min(self.failures - 2, 16)
        return min(_FIRST_PAUSE_S * 2.0**doublings, _LONGEST_PAUSE_S)


def is_hung(*, silent_s: float, has_started: bool, startup_deadline_s: float) -> bool:
    """Return whether a process is hung and should be killed.

    silent_s: seconds since the first unanswered health check.
    has_started: whether the process has reported that it serves. Before that it may still load a
        model, and `startup_deadline_s` applies.
    """
    return silent_s >= (SILENCE_DEADLINE_S if has_started else startup_deadline_s)
