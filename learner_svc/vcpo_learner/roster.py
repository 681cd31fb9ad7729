"""The roster: which workers there are, going by when each was last heard of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vcpo_learner.leases import Clock

WORKER_LOST_AFTER_S = 60.0
"""A worker not heard of for this long is no longer counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeen:
    """A worker's last sign of life."""

    worker_id: str
    rollout_group: str
    policy_version: int
    """Version it held when it last asked for work."""
    seen_s: float
    """On the clock of the roster."""
    accepted_trajectories: int = 0
    """Since it entered."""


class Roster:
    """Workers heard of lately; those lost are forgotten. Owner: the learner's event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._workers: dict[str, WorkerSeen] = {}

    def workers(self) -> list[WorkerSeen]:
        """Workers heard of lately."""
        oldest_s = self._clock() - WORKER_LOST_AFTER_S
        return [worker for worker in self._workers.values() if worker.seen_s >= oldest_s]

    def enter(self, worker_id: str, rollout_group: str, policy_version: int) -> None:
        """Note a worker that asks for work, and forget those that are lost."""
        known = self._workers.get(worker_id)
        self._workers[worker_id] = WorkerSeen(
            worker_id=worker_id,
            rollout_group=rollout_group,
            policy_version=policy_version,
            seen_s=self._clock(),
            accepted_trajectories=known.accepted_trajectories if known else 0,
        )
        self._workers = {worker.worker_id: worker for worker in self.workers()}

    def confirm(self, worker_id: str, *, num_accepted: int = 0) -> bool:
        """Note that a worker lives; False, and no note, when it has not entered or has left.

        num_accepted: trajectories of it that have just been accepted.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return False
        self._workers[worker_id] = replace(
            worker,
            seen_s=self._clock(),
            accepted_trajectories=worker.accepted_trajectories + num_accepted,
        )
        return True

    def leave(self, worker_id: str) -> None:
        """Forget a worker that is gone."""
        self._workers.pop(worker_id, None)
