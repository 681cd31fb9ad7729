"""Failed generations, judged by worker: is one worker at fault, or the run?

A generation fails because of what all workers share (environment, model, reward server) or because
of the machine that it runs on. Only the other workers tell which. With M failures in a row allowed
(`failurePolicy.maxFailuresInARow`), a worker is

```
suspect    after M/2 failures in a row of its own
               while no other has delivered since    it gets no work, if another one may still show
               once another one has                  it gets one group at a time
at fault   after M/2 more, of leases that were granted after another worker had delivered
```

Failures before another worker delivers count against nobody alone: when a reward server comes back,
the first worker that succeeds proves nothing against those that failed with it before. A worker
speaks against others only if at least half of its last generations succeeded, so an environment
that mostly fails sets nobody aside.

The run ends when every worker at work has failed since the last success of any, and their
failures, of each at most its share of M, add up to M. So one worker that works keeps the run
alive, whatever the others do, and the failures of one do not count for another.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

_RECENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOutcomes:
    """How the generations of one worker ended; times are seconds of one clock."""

    in_a_row: int = 0
    """Failures since its last success."""
    against_others: int = 0
    """Failures in this row of leases that were granted after another worker had delivered."""
    row_began_s: float = math.inf
    """Time of the first of these failures."""
    outdone_since_s: float = math.inf
    """Time at which another worker first delivered after that."""
    last_success_s: float = -math.inf
    recent: tuple[bool, ...] = ()
    """Whether each of its last generations succeeded, the latest last."""

    def after_success(self, now_s: float) -> WorkerOutcomes:
        """Return the outcomes with one more success."""
        return WorkerOutcomes(last_success_s=now_s, recent=(*self.recent, True)[-_RECENT:])

    def after_success_of(self, other: WorkerOutcomes) -> WorkerOutcomes:
        """Return the outcomes of a failing worker when another one has just delivered.

        other: outcomes of that worker, with its success.
        """
        if not self.is_outdone_by(other):
            return self
        return replace(self, outdone_since_s=min(self.outdone_since_s, other.last_success_s))

    def after_failure(
        self, now_s: float, *, granted_s: float, others: Iterable[WorkerOutcomes]
    ) -> WorkerOutcomes:
        """Return the outcomes with one more failure.

        granted_s: when its lease was granted; infinitely early if that is not known.
        others: outcomes of the other workers.
        """
        is_against = granted_s >= self.outdone_since_s and any(map(self.is_outdone_by, others))
        return replace(
            self,
            in_a_row=self.in_a_row + 1,
            against_others=self.against_others + is_against,
            row_began_s=min(self.row_began_s, now_s),
            recent=(*self.recent, False)[-_RECENT:],
        )

    def is_outdone_by(self, other: WorkerOutcomes) -> bool:
        """Whether another worker works, and delivered after this one began to fail."""
        works = any(other.recent) and 2 * sum(other.recent) >= len(other.recent)
        return works and other.last_success_s > self.row_began_s


def is_suspect(outcomes: WorkerOutcomes, max_in_a_row: int) -> bool:
    """Return whether a worker failed so often in a row that it may be at fault."""
    return outcomes.in_a_row >= _patience(max_in_a_row)


def is_at_fault(outcomes: WorkerOutcomes, max_in_a_row: int) -> bool:
    """Return whether a worker failed so often where another one delivers that it is set aside."""
    return outcomes.against_others >= _patience(max_in_a_row)


def max_groups(
    outcomes: WorkerOutcomes,
    others: Iterable[WorkerOutcomes],
    pending: Iterable[WorkerOutcomes],
    max_in_a_row: int,
) -> int | None:
    """Return how many groups a worker may hold, because of its failures; None sets no limit.

    others: outcomes of the other workers.
    pending: of those that may still deliver. If they are suspect as well, or there are none,
        somebody must try whether the cause is over.
    """
    if not is_suspect(outcomes, max_in_a_row):
        return None
    if any(outcomes.is_outdone_by(other) for other in others):
        return 1
    return None if all(is_suspect(other, max_in_a_row) for other in pending) else 0


def is_run_at_fault(
    failures: Mapping[str, int], at_work: Collection[str], max_in_a_row: int
) -> bool:
    """Return whether the failures since the last success of any worker are the run's.

    failures: by worker, those that are gone included.
    at_work: workers that may still deliver.
    """
    if any(name not in failures for name in at_work):
        return False
    share = math.ceil(max_in_a_row / max(1, len(failures)))
    return sum(min(number, share) for number in failures.values()) >= max_in_a_row


def _patience(max_in_a_row: int) -> int:
    return math.ceil(max_in_a_row / 2)
