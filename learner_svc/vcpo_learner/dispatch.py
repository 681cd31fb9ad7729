"""The dispatcher: who gets which prompt, when, and what becomes of the answers.

It joins the ledger (training), the evaluation round (held-out prompts), admission (how much work
may be outstanding) and the workers' last signs of life. All of it lives on the learner's event
loop; nothing here blocks, and time is injected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from vcpo.control.admission import admissible_trajectories
from vcpo.spec import VCPORunSpec
from vcpo.wire.phase import RunPhase
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.broadcast import Broadcast
from vcpo_learner.evaluation import EvaluationResult, EvaluationRound
from vcpo_learner.leases import Clock, OpenLease, SubmitOutcome
from vcpo_learner.ledger import DropReason, Group, Ledger

_POLL_S = 1.0
"""Waiting loops look again at least this often, for leases that expire."""
WORKER_LOST_AFTER_S = 60.0
"""A worker not heard of for this long is no longer counted."""


class Purpose(StrEnum):
    """What a lease's trajectories are for."""

    TRAIN = "train"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRequest:
    """A worker asking for prompts."""

    worker_id: str
    rollout_group: str
    incarnation: str
    held_policy_version: int
    max_trajectories: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One lease and what it is for."""

    purpose: Purpose
    lease: OpenLease


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeen:
    """A worker's last sign of life."""

    worker_id: str
    rollout_group: str
    policy_version: int
    seen_s: float


class Dispatcher:
    """Grants leases, takes submissions, hands batches to the training loop."""

    def __init__(
        self, *, spec: VCPORunSpec, ledger: Ledger, incarnation: str, clock: Clock
    ) -> None:
        self.phase = RunPhase.RUNNING
        self.policy_version = 0
        self.admission_lag_steps = spec.algorithm.max_policy_lag_steps
        self.accepted_tokens = 0
        """Response tokens of accepted training trajectories."""
        self._spec = spec
        self._ledger = ledger
        self._incarnation = incarnation
        self._clock = clock
        self._workers: dict[str, WorkerSeen] = {}
        self._round: EvaluationRound | None = None
        self._round_is_exclusive = False
        self._changed = Broadcast()

    @property
    def ledger(self) -> Ledger:
        """Where the training trajectories are kept."""
        return self._ledger

    def workers(self) -> list[WorkerSeen]:
        """Workers heard of lately."""
        oldest_s = self._clock() - WORKER_LOST_AFTER_S
        return [worker for worker in self._workers.values() if worker.seen_s >= oldest_s]

    def notify(self) -> None:
        """Wake everybody who waits, after a change made from outside (version, phase, limit)."""
        self._changed.notify()

    def throttle(self, admission_lag_steps: int) -> int:
        """Admit new work as if the lag bound were this; never above the run's own bound."""
        bound = self._spec.algorithm.max_policy_lag_steps
        self.admission_lag_steps = min(admission_lag_steps, bound)
        self.notify()
        return self.admission_lag_steps

    async def lease(self, request: WorkRequest, *, wait_s: float) -> list[Assignment]:
        """Grant what may be granted; waits up to `wait_s` for there to be something."""
        deadline_s = self._clock() + wait_s
        while True:
            self._see(request)
            self._expire()
            assignments = self._grant(request)
            remaining_s = deadline_s - self._clock()
            if assignments or self.phase is not RunPhase.RUNNING or remaining_s <= 0:
                return assignments
            await self._changed.wait(min(remaining_s, _POLL_S))

    def submit(
        self, worker_id: str, lease_id: str, trajectories: Sequence[Trajectory]
    ) -> list[SubmitOutcome]:
        """Accept trajectories of a lease; repeating a submission changes nothing.

        Raises:
            InvalidMessageError: when an id does not belong to the lease.
        """
        self._still_alive(worker_id)
        if self._round is not None and self._round.holds(lease_id):
            outcomes = self._round.submit(lease_id, trajectories)
        else:
            outcomes = self._ledger.submit(lease_id, trajectories)
            self.accepted_tokens += sum(
                len(trajectory.response_token_ids)
                for trajectory, outcome in zip(trajectories, outcomes, strict=True)
                if outcome is SubmitOutcome.ACCEPTED
            )
        self.notify()
        return outcomes

    def fail(self, worker_id: str, lease_id: str) -> None:
        """End a lease whose generation failed; the prompt is granted again, a few times."""
        self._still_alive(worker_id)
        if self._round is not None and self._round.holds(lease_id):
            self._round.fail(lease_id)
        else:
            self._ledger.end([lease_id], DropReason.GENERATION_FAILED)
        self.notify()

    def release(self, worker_id: str, lease_ids: Sequence[str]) -> int:
        """Take leases back; no ids means all of the worker's, and that it is gone."""
        released = 0 if self._round is None else self._round.release(worker_id, lease_ids)
        if lease_ids:
            released += self._ledger.end(lease_ids, DropReason.HANDED_BACK)
        else:
            released += self._ledger.end_all_of(worker_id, DropReason.HANDED_BACK)
            self._workers.pop(worker_id, None)
        self.notify()
        return released

    async def next_batch(self) -> list[Group] | None:
        """Wait for one step's groups and consume them; None once the run is no longer running."""
        while self.phase is RunPhase.RUNNING:
            self._expire()
            batch = self._ledger.take_batch(
                policy_version=self.policy_version,
                max_lag_steps=self._spec.algorithm.max_policy_lag_steps,
            )
            if batch is not None:
                self.notify()
                return batch
            await self._changed.wait(_POLL_S)
        return None

    async def evaluate(self, step: int, *, exclusive: bool) -> EvaluationResult | None:
        """Run an evaluation round to its end, after the one under way.

        While an exclusive round lasts no training prompt is granted, so that every answer comes
        from one version. Returns None when nothing was answered or the run stopped.
        """
        while self._round is not None and self.phase is RunPhase.RUNNING:
            await self._changed.wait(_POLL_S)
        current = self._round = self._new_round(step)
        self._round_is_exclusive = exclusive
        self.notify()
        try:
            while not current.done and self.phase is RunPhase.RUNNING:
                self._expire()
                await self._changed.wait(_POLL_S)
        finally:
            self._round = None
            self._round_is_exclusive = False
            self.notify()
        return current.result() if current.done else None

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until nothing is in flight, at most `timeout_s` seconds."""
        deadline_s = self._clock() + timeout_s
        while self._ledger.counts().in_flight and (left := deadline_s - self._clock()) > 0:
            await self._changed.wait(min(left, _POLL_S))

    def in_flight_by_worker(self) -> Mapping[str, int]:
        """Training trajectories promised and not yet arrived, by worker."""
        return self._ledger.in_flight_by_worker()

    def _grant(self, request: WorkRequest) -> list[Assignment]:
        if self.phase is not RunPhase.RUNNING or request.incarnation != self._incarnation:
            return []
        if self._round is not None:
            leases = self._round.grant(
                request.worker_id,
                max_trajectories=request.max_trajectories,
                policy_version=self.policy_version,
            )
            if leases:
                return [Assignment(purpose=Purpose.EVALUATION, lease=lease) for lease in leases]
        if self._round_is_exclusive:
            return []
        leases = self._ledger.grant(
            request.worker_id,
            num_groups=self._admissible_groups(request),
            policy_version=self.policy_version,
        )
        return [Assignment(purpose=Purpose.TRAIN, lease=lease) for lease in leases]

    def _admissible_groups(self, request: WorkRequest) -> int:
        counts = self._ledger.counts()
        accepted = counts.buffered + counts.consumed
        admissible = admissible_trajectories(
            admission_lag_steps=self.admission_lag_steps,
            # Nobody can hold what is not published yet.
            held_policy_version=min(request.held_policy_version, self.policy_version),
            batch_trajectories=self._spec.batch.trajectories,
            accepted=accepted,
            in_flight=counts.in_flight,
        )
        wanted = self._spec.steps * self._spec.batch.trajectories - accepted - counts.in_flight
        free = min(admissible, wanted, request.max_trajectories)
        return max(0, free // self._spec.batch.trajectories_per_prompt)

    def _new_round(self, step: int) -> EvaluationRound:
        return EvaluationRound(
            step=step,
            num_prompts=self._spec.evaluation.prompts,
            samples_per_prompt=self._spec.evaluation.samples_per_prompt,
            lease_timeout_s=self._spec.lease.timeout_seconds,
            max_attempts=self._spec.lease.max_attempts,
            incarnation=self._incarnation,
            clock=self._clock,
        )

    def _expire(self) -> None:
        expired = self._ledger.expire()
        if self._round is not None:
            self._round.expire()
        if expired:
            self.notify()

    def _see(self, request: WorkRequest) -> None:
        self._workers[request.worker_id] = WorkerSeen(
            worker_id=request.worker_id,
            rollout_group=request.rollout_group,
            policy_version=request.held_policy_version,
            seen_s=self._clock(),
        )

    def _still_alive(self, worker_id: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._workers[worker_id] = WorkerSeen(
                worker_id=worker.worker_id,
                rollout_group=worker.rollout_group,
                policy_version=worker.policy_version,
                seen_s=self._clock(),
            )
