"""Supervision of processes: when a failed process is restarted, and when a process is hung.

Only progress ends a streak of failures. Time does not: a process that starts for minutes and then
dies crash-loops just like a process that dies after a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

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


LEAST_LIMIT_S: Final = 120.0
"""Shortest limit, in seconds: a busy machine may delay work of milliseconds by as much."""
_TIMES_THE_LONGEST: Final = 10.0
"""A batch of the longest responses takes several times as long as a usual one, never as many."""
REMEMBERED: Final = 32
"""So many of the last durations count, or one odd piece would set the limit for ever."""


def work_limit_s(durations_s: Sequence[float], *, first_s: float, least_s: float) -> float:
    """Return for how long a piece of work may run until it counts as stuck, in seconds.

    durations_s: of earlier pieces of the same kind, the newest last.
    first_s: limit of a first piece, which may compile kernels or fill caches.
    least_s: below which no limit is; `LEAST_LIMIT_S`, or more where the work has deadlines of its
        own that say more.
    """
    if not durations_s:
        return max(first_s, least_s)
    return max(_TIMES_THE_LONGEST * max(durations_s[-REMEMBERED:]), least_s)
