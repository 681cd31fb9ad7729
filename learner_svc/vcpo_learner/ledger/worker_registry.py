"""The run's workers: the last contact of each, what it delivers, who was set aside, and why.

A worker is known by its name. A process that was set aside gets no work again; the one after it
under the same name shows another process id and begins anew.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, replace

from vcpo.records.reasons import SetAsideCause
from vcpo.records.weight_updates import NO_UPDATES, WeightUpdates
from vcpo_learner.clock import Clock

_MAX_NAMED = 16
"""Number of workers that signals name; metrics count all."""
WORKER_LOST_AFTER_S = 60.0
"""A worker without contact for longer is lost: it is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredWorker:
    """What the learner knows of one worker."""

    worker_id: str
    process_id: str = ""
    """Random, of its process."""
    last_seen_s: float = 0.0
    """Time of its last call, on the registry's clock."""
    rollout_group: str = ""
    policy_version: int = 0
    """Version that the worker held when it last asked for work."""
    peak_memory_bytes: int = 0
    """Most memory of its process until then."""
    accepted_trajectories: int = 0
    """Trajectories accepted from it since it registered."""
    request_number: int = 0
    """Requests for work since it registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAsideWorker:
    """A worker that the learner took out of the run."""

    worker_id: str
    rollout_group: str
    cause: SetAsideCause
    message: str
    """The worker's fault, as a clause."""
    time_s: float
    """Time at which it was set aside, on the learner's clock."""

    @property
    def sentence(self) -> str:
        return f"{self.cause}: {self.message}"


class WorkerRegistry:
    """The workers that asked for work lately, and those set aside. Owner: the learner's event loop.

    clock: of `RegisteredWorker.last_seen_s`.
    """

    def __init__(self, clock: Clock) -> None:
        self.weight_updates = NO_UPDATES
        """Versions that workers took, over all workers, those that are gone included."""
        self.num_set_aside: Counter[SetAsideCause] = Counter()
        """Workers that were set aside, by cause."""
        self.latest_set_aside: deque[SetAsideWorker] = deque(maxlen=_MAX_NAMED)
        """The last of them, the latest first."""
        self._clock = clock
        self._workers: OrderedDict[str, RegisteredWorker] = OrderedDict()
        """By name, least recent contact first."""
        self._updates: dict[str, WeightUpdates] = {}
        """Counts that each process reported last."""
        self._set_aside: dict[str, SetAsideWorker] = {}
        """By process id."""

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def workers(self) -> list[RegisteredWorker]:
        return [each for each in self._workers.values() if self._is_alive(each)]

    def record_request(
        self,
        worker_id: str,
        rollout_group: str,
        policy_version: int,
        *,
        process_id: str = "",
        peak_memory_bytes: int = 0,
        weight_updates: WeightUpdates = NO_UPDATES,
    ) -> int:
        """Record that a worker asks for work; return the number of its request.

        weight_updates: counts of its process since the start of it.
        """
        while self._workers and not self._is_alive(next(iter(self._workers.values()))):
            self._workers.popitem(last=False)
        known = self._workers.get(worker_id)
        if known is None or known.process_id != process_id:
            known = RegisteredWorker(worker_id=worker_id, process_id=process_id)
        self.weight_updates += weight_updates - self._updates.get(process_id, NO_UPDATES)
        self._updates[process_id] = weight_updates
        worker = replace(
            known,
            rollout_group=rollout_group,
            policy_version=policy_version,
            peak_memory_bytes=peak_memory_bytes,
            request_number=known.request_number + 1,
        )
        self._put(worker)
        return worker.request_number

    def record_contact(
        self, worker_id: str, *, num_accepted: int = 0, request_number: int | None = None
    ) -> bool:
        """Record that a worker is alive; return False, and record nothing, if it does not count.

        A worker does not count if it has not asked for work or was deregistered since.

        num_accepted: trajectories of the worker that the learner has just accepted.
        request_number: if given, the worker must not have sent a later request for work.
        """
        worker = self._workers.get(worker_id)
        if worker is None or request_number not in {None, worker.request_number}:
            return False
        accepted = worker.accepted_trajectories + num_accepted
        self._put(replace(worker, accepted_trajectories=accepted))
        return True

    def deregister(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    def set_aside(self, worker_id: str, cause: SetAsideCause, message: str) -> SetAsideWorker:
        """Deregister a worker, and let its process get no work again; it may be gone already.

        message: what it did, as a clause without a full stop.
        """
        worker = self._workers.pop(worker_id, RegisteredWorker(worker_id=worker_id))
        found = SetAsideWorker(
            worker_id=worker_id,
            rollout_group=worker.rollout_group,
            cause=cause,
            message=message,
            time_s=self._clock(),
        )
        self.num_set_aside[cause] += 1
        self.latest_set_aside.appendleft(found)
        self._set_aside[worker.process_id] = found
        return found

    def set_aside_process(self, process_id: str) -> SetAsideWorker | None:
        return self._set_aside.get(process_id)

    def _put(self, worker: RegisteredWorker) -> None:
        self._workers[worker.worker_id] = replace(worker, last_seen_s=self._clock())
        self._workers.move_to_end(worker.worker_id)

    def _is_alive(self, worker: RegisteredWorker) -> bool:
        return worker.last_seen_s >= self._clock() - WORKER_LOST_AFTER_S
