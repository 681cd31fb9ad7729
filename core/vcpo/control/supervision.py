"""Supervision: when a process that fails is started again, and when one counts as hung.

Only progress ends a streak of failures, never time: a process that takes minutes to start and dies
then crash-loops no less than one that dies in a second.
"""

from __future__ import annotations

from dataclasses import dataclass

SILENCE_DEADLINE_S = 60.0
"""A process that has answered nothing for this long is hung; pods' liveness probes say the same."""

MAX_WORKER_FAILURES = 5
"""Failures in a row of workers that never delivered, while no other worker has, that end a run."""

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureStreak:
    """Failures in a row, without progress between them."""

    failures: int = 0
    progress: int = 0
    """Most progress that was seen at a failure, in any unit that grows with the work done. What is
    only done again after a failure, as steps since a checkpoint, is no progress."""

    def after_failure(self, progress: int) -> FailureStreak:
        """The streak with one more failure; `progress` is what has been reached by now."""
        if progress > self.progress:
            return FailureStreak(failures=1, progress=progress)
        return FailureStreak(failures=self.failures + 1, progress=self.progress)

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next start: none, then 1, 2, 4 and so on up to 60."""
        if self.failures <= 1:
            return 0.0
        # Bounded before it is raised: a streak may be long enough to overflow a float.
        doublings = min(self.failures - 2, 16)
        return min(_FIRST_PAUSE_S * 2.0**doublings, _LONGEST_PAUSE_S)


def is_hung(*, silent_s: float, has_started: bool, startup_deadline_s: float) -> bool:
    """Whether a process that has not answered for `silent_s` seconds is to be killed.

    has_started: whether it has ever said that it serves; until then loading takes its time.
    """
    return silent_s >= (SILENCE_DEADLINE_S if has_started else startup_deadline_s)
