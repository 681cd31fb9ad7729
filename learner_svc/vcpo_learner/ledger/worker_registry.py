"""The run's workers: the last contact of each, what it delivers, who was set aside, and why.

A worker is known by its name and by the key of its process (`vcpo_learner.services.callers`). The
process that was set aside is refused; the one after it under the same name begins anew.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, replace

from vcpo.api import VCPORunSpec
from vcpo.control.quota import Trust
from vcpo.records.reasons import SetAsideCause
from vcpo.records.weight_updates import NO_UPDATES, WeightUpdates
from vcpo_learner.clock import Clock

_MAX_NAMED = 16
"""Number of workers that signals name; metrics count all."""
_MAX_EVENT_LINES = 64
WORKER_LOST_AFTER_S = 60.0
"""A worker without contact for longer is lost: it is not counted."""
_DEFAULT_MAX_WORKERS = 16_384
_SPARE_WORKERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredWorker:
    """What the learner knows of one worker."""

    worker_id: str
    last_seen_s: float = 0.0
    """Time of its last call, on the registry's clock."""
    rollout_group: str = ""
    """Empty until the worker asks for work."""
    policy_version: int = 0
    """Version that the worker held when it last asked for work."""
    peak_memory_bytes: int = 0
    """Most memory of its process until then."""
    accepted_trajectories: int = 0
    """Trajectories accepted from it since it registered."""
    trust: Trust = Trust.NEW
    request_number: int = 0
    """Requests for work since it registered."""


class WorkerRegistry:
    """The workers that the learner had contact with lately. Owner: the learner's event loop.

    The registry keeps at most `max_workers` workers. A further one replaces the worker without
    contact for the longest time; trusted workers are replaced last. So a client that invents worker
    ids cannot evict the workers that deliver.
    """

    def __init__(self, clock: Clock, *, max_workers: int = _DEFAULT_MAX_WORKERS) -> None:
        self._clock = clock
        self._max_workers = max_workers
        self._workers: OrderedDict[str, RegisteredWorker] = OrderedDict()
        """Least recent contact first."""

    def __contains__(self, worker_id: str) -> bool:
        """Return whether the worker is registered, lost or not."""
        return worker_id in self._workers

    def is_alive(self, worker_id: str) -> bool:
        """Return whether the worker is registered and not lost."""
        worker = self._workers.get(worker_id)
        return worker is not None and self._is_alive(worker)

    def workers(self) -> list[RegisteredWorker]:
        """Return the workers that have asked for work and are not lost."""
        return [
            worker
            for worker in self._workers.values()
            if worker.request_number > 0 and self._is_alive(worker)
        ]

    def trust_of(self, worker_id: str) -> Trust:
        """Return the trust in a worker; that in a new one if it has not asked for work lately."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.request_number == 0 or not self._is_alive(worker):
            return Trust.NEW
        return worker.trust

    def record_request(
        self, worker_id: str, rollout_group: str, policy_version: int, *, peak_memory_bytes: int = 0
    ) -> int:
        """Record that a worker asks for work; return the number of its request."""
        self._remove_lost()
        known = self._worker_or_new(worker_id)
        worker = replace(
            known,
            rollout_group=rollout_group,
            policy_version=policy_version,
            peak_memory_bytes=peak_memory_bytes,
            request_number=known.request_number + 1,
        )
        self._put(worker)
        return worker.request_number

    def record_weights_call(self, worker_id: str) -> None:
        """Record that a worker asks for weights, perhaps before it asks for work."""
        self._remove_lost()
        self._put(self._worker_or_new(worker_id))

    def record_contact(
        self, worker_id: str, *, num_accepted: int = 0, request_number: int | None = None
    ) -> bool:
        """Record that a worker is alive; return False, and record nothing, if it does not count.

        A worker does not count if it has not asked for work or was deregistered since.

        num_accepted: trajectories of the worker that the learner has just accepted.
        request_number: if given, the worker must not have sent a later request for work.
        """
        worker = self._workers.get(worker_id)
        if worker is None or worker.request_number == 0:
            return False
        if request_number not in {None, worker.request_number}:
            return False
        self._put(
            replace(
                worker,
                accepted_trajectories=worker.accepted_trajectories + num_accepted,
                trust=Trust.TRUSTED if num_accepted else worker.trust,
            )
        )
        return True

    def mark_doubted(self, worker_id: str) -> None:
        """Record that a lease of a worker expired; the next accepted trajectory restores trust."""
        if worker_id in self._workers:
            self._workers[worker_id] = replace(self._workers[worker_id], trust=Trust.DOUBTED)

    def deregister(self, worker_id: str) -> None:
        """Remove a worker that is gone."""
        self._workers.pop(worker_id, None)

    def _worker_or_new(self, worker_id: str) -> RegisteredWorker:
        """Return what is known of a worker; the defaults if it is not registered."""
        return self._workers.get(worker_id) or RegisteredWorker(worker_id=worker_id)

    def _put(self, worker: RegisteredWorker) -> None:
        """Store a worker with the time of this contact; evict another one if there is no room."""
        if worker.worker_id not in self._workers and len(self._workers) >= self._max_workers:
            self._evict()
        self._workers[worker.worker_id] = replace(worker, last_seen_s=self._clock())
        self._workers.move_to_end(worker.worker_id)

    def _remove_lost(self) -> None:
        while self._workers and not self._is_alive(next(iter(self._workers.values()))):
            self._workers.popitem(last=False)

    def _evict(self) -> None:
        """Remove the worker with the least recent contact; a trusted one only if all are."""
        untrusted = (one.worker_id for one in self._workers.values() if one.trust != Trust.TRUSTED)
        self.deregister(next(untrusted, next(iter(self._workers))))

    def _is_alive(self, worker: RegisteredWorker) -> bool:
        return worker.last_seen_s >= self._clock() - WORKER_LOST_AFTER_S


class WorkerCounters:
    """The versions that all workers took, those that are gone included.

    Each worker reports its counts since its start. The sum remembers the last `max_workers`
    workers; if a worker reports again after so many others, its whole counts are added again.
    """

    def __init__(self, *, max_workers: int) -> None:
        self._max_workers = max_workers
        self._counts: OrderedDict[str, WeightUpdates] = OrderedDict()
        self.total = NO_UPDATES

    def set(self, worker_id: str, counts: WeightUpdates) -> None:
        """Record the counts that a worker reports now."""
        self.total += counts - self._counts.get(worker_id, NO_UPDATES)
        self._counts[worker_id] = counts
        self._counts.move_to_end(worker_id)
        if len(self._counts) > self._max_workers:
            self._counts.popitem(last=False)


def max_workers(spec: VCPORunSpec) -> int:
    """Return how many workers a learner remembers: twice the run's, as workers are replaced."""
    return 2 * sum(group.max_replicas for group in spec.rollouts) + _SPARE_WORKERS


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAsideWorker:
    """A worker that the learner took out of the run."""

    worker_id: str
    rollout_group: str
    """Empty if it had not asked for work."""
    cause: SetAsideCause
    message: str
    """The worker's fault, as a clause."""
    time_s: float
    """Time at which it was set aside, on the learner's clock."""

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
        """Workers whose processes are refused, by name."""
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
