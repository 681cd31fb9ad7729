"""Workers that were set aside: who, why and when, and the event of each.

A worker is known by its name and by the key of its process (`vcpo_learner.services.callers`). The
process that was set aside is refused; the one after it under the same name begins anew.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from vcpo.records.reasons import SetAsideCause

_MAX_NAMED = 16
"""Number of workers that signals name; metrics count all."""
_MAX_EVENT_LINES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAsideWorker:
    """A worker that the learner took out of the run."""

    worker_id: str
    rollout_group: str
    """Empty if it had not asked for work."""
    cause: SetAsideCause
    message: str
    """What it did, as a clause."""
    time_s: float
    """On the learner's clock."""

    @property
    def sentence(self) -> str:
        """Cause and message in one line."""
        return f"{self.cause}: {self.message}"


class SetAsideWorkers:
    """The workers that were set aside since the learner's start. Owner: its event loop.

    Remembers the last `max_workers`; one that calls again after so many others begins anew.
    """

    def __init__(self, *, max_workers: int) -> None:
        self.counts: Counter[SetAsideCause] = Counter()
        """Workers that were set aside, those that are forgotten included, by cause."""
        self._max_workers = max_workers
        self._workers: OrderedDict[str, SetAsideWorker] = OrderedDict()
        """By the name of each whose process is refused."""
        self._latest: deque[SetAsideWorker] = deque(maxlen=_MAX_NAMED)
        self._event_lines: deque[str] = deque(maxlen=_MAX_EVENT_LINES)

    def __contains__(self, worker_id: str) -> bool:
        """Return whether the process under a name is refused."""
        return worker_id in self._workers

    @property
    def latest(self) -> list[SetAsideWorker]:
        """The last workers that were set aside, the latest first."""
        return list(reversed(self._latest))

    def get(self, worker_id: str) -> SetAsideWorker | None:
        """Return why the process under a name is refused; None if it is not."""
        return self._workers.get(worker_id)

    def add(self, worker: SetAsideWorker) -> None:
        """Record that a worker was set aside."""
        self.counts[worker.cause] += 1
        self._workers[worker.worker_id] = worker
        if len(self._workers) > self._max_workers:
            self._workers.popitem(last=False)
        self._latest.append(worker)
        self._event_lines.append(f"{worker.worker_id}: {worker.sentence}")

    def readmit(self, worker_id: str) -> None:
        """Let another process work under a name."""
        self._workers.pop(worker_id, None)

    def take_event_lines(self) -> list[str]:
        """Return the lines for events since the last call."""
        lines = list(self._event_lines)
        self._event_lines.clear()
        return lines
