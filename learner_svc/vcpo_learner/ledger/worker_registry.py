"""The registry: which workers there are, going by when each was last heard of."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from vcpo.control.quota import Trust
from vcpo_learner.ledger.leases import Clock

WORKER_LOST_AFTER_S = 60.0
"""A worker not heard of for this long is no longer counted."""
_MAX_WORKERS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredWorker:
    """A worker's last sign of life."""

    worker_id: str
    rollout_group: str
    policy_version: int
    """Version it held when it last asked for work."""
    last_seen_s: float
    """On the clock of the registry."""
    accepted_trajectories: int = 0
    """Since it entered."""
    trust: Trust = Trust.NEW
    request_number: int = 1
    """How often it has asked for work since it entered."""


class WorkerRegistry:
    """Workers heard of lately; those lost are forgotten. Owner: the learner's event loop.

    max_workers: The most it keeps. A further one takes the place of the one that was not heard of
        for longest, and of one that delivers only when all do: whoever invents workers must not
        drive out those that work.
    """

    def __init__(self, clock: Clock, *, max_workers: int = _MAX_WORKERS) -> None:
        self._clock = clock
        self._max_workers = max_workers
        self._workers: OrderedDict[str, RegisteredWorker] = OrderedDict()
        """Least recently heard of first."""

    def workers(self) -> list[RegisteredWorker]:
        """Workers heard of lately."""
        oldest_s = self._clock() - WORKER_LOST_AFTER_S
        return [worker for worker in self._workers.values() if worker.last_seen_s >= oldest_s]

    def register(self, worker_id: str, rollout_group: str, policy_version: int) -> int:
        """Record a request for work, forget lost workers, and return the request's number."""
        self._forget_lost()
        known = self._workers.get(worker_id)
        if known is None and len(self._workers) >= self._max_workers:
            self._forget_one()
        request_number = known.request_number + 1 if known else 1
        self._workers[worker_id] = RegisteredWorker(
            worker_id=worker_id,
            rollout_group=rollout_group,
            policy_version=policy_version,
            last_seen_s=self._clock(),
            accepted_trajectories=known.accepted_trajectories if known else 0,
            trust=known.trust if known else Trust.NEW,
            request_number=request_number,
        )
        self._workers.move_to_end(worker_id)
        return request_number

    def record_contact(
        self, worker_id: str, *, num_accepted: int = 0, request_number: int | None = None
    ) -> bool:
        """Note that a worker lives; False, and no note, when it has not entered or has left.

        num_accepted: trajectories of it that have just been accepted.
        request_number: False as well when the worker has asked for work again since.
        """
        worker = self._workers.get(worker_id)
        if worker is None or request_number not in {None, worker.request_number}:
            return False
        self._workers[worker_id] = replace(
            worker,
            last_seen_s=self._clock(),
            accepted_trajectories=worker.accepted_trajectories + num_accepted,
            trust=Trust.TRUSTED if num_accepted else worker.trust,
        )
        self._workers.move_to_end(worker_id)
        return True

    def mark_doubted(self, worker_id: str) -> None:
        """Note that a worker let a lease run out; it is trusted again when it delivers."""
        if worker_id in self._workers:
            self._workers[worker_id] = replace(self._workers[worker_id], trust=Trust.DOUBTED)

    def deregister(self, worker_id: str) -> None:
        """Forget a worker that is gone."""
        self._workers.pop(worker_id, None)

    def _forget_lost(self) -> None:
        oldest_s = self._clock() - WORKER_LOST_AFTER_S
        while self._workers and next(iter(self._workers.values())).last_seen_s < oldest_s:
            self._workers.popitem(last=False)

    def _forget_one(self) -> None:
        untrusted = (one.worker_id for one in self._workers.values() if one.trust != Trust.TRUSTED)
        del self._workers[next(untrusted, next(iter(self._workers)))]


class WorkerCounters:
    """What each worker counts since its start, added up, those that are gone included.

    max_workers: The most that it tells apart; what one counted that came back after so many others
        is added again.
    """

    def __init__(self, *, max_workers: int) -> None:
        self._max_workers = max_workers
        self._counts: OrderedDict[str, int] = OrderedDict()
        self.total = 0

    def set(self, worker_id: str, count: int) -> None:
        """Note what a worker has counted by now."""
        self.total += count - self._counts.get(worker_id, 0)
        self._counts[worker_id] = count
        self._counts.move_to_end(worker_id)
        if len(self._counts) > self._max_workers:
            self._counts.popitem(last=False)
