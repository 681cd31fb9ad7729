"""Progress lines of a running study: one for each cell that ends."""

from __future__ import annotations

from collections.abc import Callable

from research.cells.pool import Outcome
from vcpo.report.numbers import duration

Clock = Callable[[], float]


class StudyProgress:
    """Counts cells and estimates the remaining time."""

    def __init__(self, phase: str, *, total: int, kept: int, jobs: int, clock: Clock) -> None:
        self._phase = phase
        self._total = total
        self._kept = kept
        self._jobs = jobs
        self._clock = clock
        self._started_s = clock()
        self._ended = 0
        self._failed = 0

    @property
    def num_left(self) -> int:
        return self._total - self._kept - self._ended

    def outcome_line(self, outcome: Outcome) -> str:
        """Return the line for a cell that has ended."""
        self._ended += 1
        self._failed += outcome.error is not None
        elapsed_s = self._clock() - self._started_s
        failed = f", {self._failed} failed" if self._failed else ""
        rest = duration(elapsed_s / self._ended * self.num_left)
        line = (
            f"{self._phase}: {self._kept + self._ended}/{self._total} cells{failed}, "
            f"{self.num_left} left, about {rest}  {outcome.cell.name}"
        )
        return line if outcome.error is None else f"{line} FAILED\n{outcome.error.rstrip()}"

    def closing_line(self) -> str:
        return f"{self._phase}: time is up, {self.num_left} cells left; the same command continues"

    def opening_line(self) -> str:
        kept = f", {self._kept} of them finished before" if self._kept else ""
        return f"{self._phase}: {self._total} cells{kept}, {self._jobs} at a time"
