"""The clock of a run: seconds in which it ran, without the pauses before a resume."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from vcpo.records.journal import HOST_STARTED, EventRecord, Metrics


class RunClock:
    """Turns times of records into seconds since the start of the run.

    A local host writes an event when it starts. Between the last record of one session and the
    start of the next the run did not run, and this clock stands still. A run in a cluster writes no
    such event; its clock starts with the first record.
    """

    def __init__(self, metrics: Metrics, events: Sequence[EventRecord]) -> None:
        times = [event.time_unix_s for event in events]
        times += [record.time_unix_s for record in metrics.steps]
        times += [record.time_unix_s for record in metrics.evaluations]
        times.sort()
        starts = {event.time_unix_s for event in events if event.kind == HOST_STARTED}
        self._starts_s = sorted(starts | set(times[:1]))
        ends = [max(at for at in times if at < after) for _, after in pairwise(self._starts_s)]
        ends += times[-1:]
        spans_s = [end - start for start, end in zip(self._starts_s, ends, strict=True)]
        self._elapsed_s = list(accumulate(spans_s, initial=0.0))

    @property
    def num_sessions(self) -> int:
        """How often the run was started; 0 without a record."""
        return len(self._starts_s)

    @property
    def total_s(self) -> float | None:
        """Seconds from the start to the last record; None without a record."""
        return self._elapsed_s[-1] if self._starts_s else None

    def elapsed_s(self, time_unix_s: float) -> float:
        """Return the seconds in which the run had run at a time; 0 before its start."""
        session = bisect_right(self._starts_s, time_unix_s) - 1
        if session < 0:
            return 0.0
        return self._elapsed_s[session] + time_unix_s - self._starts_s[session]
