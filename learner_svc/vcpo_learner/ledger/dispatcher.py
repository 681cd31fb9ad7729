"""The dispatcher: who gets which prompt, when, and what becomes of the answers.

It joins the ledger (training), the evaluation round (held-out prompts), admission (how much work
may be outstanding) and the workers' last signs of life. All of it lives on the learner's event
loop; nothing here blocks, and time is injected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from vcpo.control.admission import admissible_trajectories, surplus_trajectories
from vcpo.spec import VCPORunSpec
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.failures import Failure
from vcpo.wire.phase import RunPhase
from vcpo.wire.trajectory import PartialResponse, Trajectory
from vcpo_learner.ledger.change_notifier import ChangeNotifier
from vcpo_learner.ledger.evaluation import EvaluationResult, EvaluationRound
from vcpo_learner.ledger.failure_watch import FailureWatch
from vcpo_learner.ledger.groups import Group
from vcpo_learner.ledger.leases import Clock, OpenLease, SubmitOutcome
from vcpo_learner.ledger.protocol import Ledger
from vcpo_learner.ledger.quotas import Quotas, max_workers
from vcpo_learner.ledger.worker_registry import RegisteredWorker, WorkerCounters, WorkerRegistry

_POLL_S = 1.0
"""Waiting loops look again at least this often, for leases that expire."""


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
    weight_updates_in_flight: int = 0
    """As the worker counts them since its start."""
    held_lease_ids: frozenset[str] | None = None
    """All leases that it holds; None when it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One lease and what it is for."""

    purpose: Purpose
    lease: OpenLease


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
        self.failures = FailureWatch(spec, clock)
        self._spec = spec
        self._ledger = ledger
        self._incarnation = incarnation
        self._clock = clock
        self._registry = WorkerRegistry(clock, max_workers=max_workers(spec))
        self._quotas = Quotas(spec, ledger, self._registry)
        self._updates_in_flight = WorkerCounters(max_workers=4 * max_workers(spec))
        self._round: EvaluationRound | None = None
        self._round_is_exclusive = False
        self._changed = ChangeNotifier()

    @property
    def ledger(self) -> Ledger:
        """Where the training trajectories are kept."""
        return self._ledger

    def workers(self) -> list[RegisteredWorker]:
        """Workers heard of lately."""
        return self._registry.workers()

    def weight_updates_in_flight(self) -> int:
        """Versions that workers, those gone included, swapped in while sequences were under way."""
        return self._updates_in_flight.total

    def notify(self) -> None:
        """Wake everybody who waits, after a change made from outside (version, phase, limit)."""
        self._changed.notify()

    def throttle(self, admission_lag_steps: int) -> int:
        """Admit and train as if the lag bound were this; never above the run's own bound."""
        bound = self._spec.algorithm.max_policy_lag_steps
        self.admission_lag_steps = min(admission_lag_steps, bound)
        self.notify()
        return self.admission_lag_steps

    async def lease(self, request: WorkRequest, *, wait_s: float) -> list[Assignment]:
        """Grant what may be granted; waits up to `wait_s` for there to be something.

        Returns at once, with nothing, when what the worker holds is not the newest version: what it
        asks for as the holder of that version will hardly become admissible, but a request as the
        holder of the next may be. The same when the worker is released while it waits: whoever saw
        it die must not have work granted to the dead. And when it asks anew: it has given up this
        request.
        """
        deadline_s = self._clock() + wait_s
        worker_id = request.worker_id
        request_number = self._registry.register(
            worker_id, request.rollout_group, request.held_policy_version
        )
        self._updates_in_flight.set(worker_id, request.weight_updates_in_flight)
        self._release_lost(request)
        while self.phase is RunPhase.RUNNING and self._registry.record_contact(
            worker_id, request_number=request_number
        ):
            self._expire()
            assignments = self._grant(request)
            remaining_s = deadline_s - self._clock()
            if assignments or not self._holds_newest(request) or remaining_s <= 0:
                return assignments
            await self._changed.wait(min(remaining_s, _POLL_S))
        return []

    def submit(
        self, worker_id: str, lease_id: str, trajectories: Sequence[Trajectory]
    ) -> list[SubmitOutcome]:
        """Accept trajectories of a lease; repeating a submission changes nothing.

        Raises:
            InvalidMessageError: when an id does not belong to the lease, or a token is labelled
                with a version that does not exist yet.
        """
        if self._has_issued(lease_id):
            self._check_versions("trajectories", trajectories)
        if self._round is not None and self._round.has_issued(lease_id):
            outcomes = self._round.submit(lease_id, trajectories)
        else:
            outcomes = self._ledger.submit(lease_id, trajectories)
            self.accepted_tokens += sum(
                trajectory.num_sampled_tokens
                for trajectory, outcome in zip(trajectories, outcomes, strict=True)
                if outcome is SubmitOutcome.ACCEPTED
            )
            if self._ledger.counts().buffered >= self._spec.batch.trajectories:
                self._preempt_surplus()
        num_accepted = sum(outcome is SubmitOutcome.ACCEPTED for outcome in outcomes)
        self._registry.record_contact(worker_id, num_accepted=num_accepted)
        if num_accepted:
            self.failures.record_success()
        self.notify()
        return outcomes

    async def wait_for_preemptions(
        self, worker_id: str, heard_lease_ids: Collection[str], *, wait_s: float
    ) -> list[str]:
        """Leases that a worker is to cut, waiting up to `wait_s` for one it has not heard of."""
        deadline_s = self._clock() + wait_s
        while True:
            lease_ids = self._ledger.preempted_leases(worker_id)
            remaining_s = deadline_s - self._clock()
            if remaining_s <= 0 or not set(lease_ids).issubset(heard_lease_ids):
                return lease_ids
            await self._changed.wait(min(remaining_s, _POLL_S))

    def fail(self, worker_id: str, lease_id: str, failure: Failure) -> None:
        """End a lease whose generation failed; the prompt is granted again, a few times."""
        if self._has_issued(lease_id):
            self.failures.record_failure(failure)
        self._registry.record_contact(worker_id)
        if self._round is not None:
            self._round.fail(lease_id)
        self._ledger.fail(lease_id)
        self.notify()

    def release(
        self,
        worker_id: str,
        lease_ids: Sequence[str],
        begun: Sequence[PartialResponse] = (),
    ) -> int:
        """Take leases back; no ids means all of the worker's, and that it is gone.

        begun: what was sampled, when one lease is named. Of an evaluation nothing is kept.

        Raises:
            InvalidMessageError: when there are too many answers, or a token is labelled with a
                version that does not exist yet.
        """
        if begun and self._has_issued(lease_ids[0]):
            self._check_versions("begun", begun)
        released = self._ledger.release(worker_id, lease_ids, begun)
        if self._round is not None:
            released += self._round.release(worker_id, lease_ids)
        if not lease_ids:
            self._registry.deregister(worker_id)
        self.notify()
        return released

    async def next_batch(self) -> list[Group] | None:
        """Wait for one step's groups and consume them; None once the run is no longer running.

        Raises:
            TooManyFailuresError: when nothing is answered any more.
        """
        while self.phase is RunPhase.RUNNING:
            self.failures.check()
            self._expire()
            batch = self._ledger.take_batch(
                policy_version=self.policy_version,
                max_lag_steps=self._spec.algorithm.max_policy_lag_steps,
                admission_lag_steps=self.admission_lag_steps,
            )
            if batch is not None:
                self._preempt_surplus()
                self.notify()
                return batch
            await self._changed.wait(_POLL_S)
        return None

    async def evaluate(self, step: int, *, exclusive: bool) -> EvaluationResult | None:
        """Run an evaluation round to its end, after the one under way.

        While an exclusive round lasts no training prompt is granted, and its own only to holders of
        the newest version, so that every answer comes from one version. Returns None when nothing
        was answered or the run stopped.

        Raises:
            TooManyFailuresError: when nothing is answered before the first step. Later rounds give
                their prompts up and end; whether the run can go on shows in training.
        """
        while self._round is not None:
            if self.phase is not RunPhase.RUNNING:
                return None
            await self._changed.wait(_POLL_S)
        current = self._round = self._new_round(step)
        self._round_is_exclusive = exclusive
        self.notify()
        try:
            while not current.done and self.phase is RunPhase.RUNNING:
                if step == 0:
                    self.failures.check()
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
        if request.incarnation != self._incarnation:
            return []
        if self._round_is_exclusive and not self._holds_newest(request):
            return []
        if self._round is not None:
            quota = self._quotas.evaluation(request.worker_id, request.rollout_group, self._round)
            leases = self._round.grant(
                request.worker_id,
                max_trajectories=min(request.max_trajectories, quota),
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
            oldest_partial_version=self._oldest_partial_version(),
        )
        return [Assignment(purpose=Purpose.TRAIN, lease=lease) for lease in leases]

    def _holds_newest(self, request: WorkRequest) -> bool:
        is_ours = request.incarnation == self._incarnation
        return is_ours and request.held_policy_version >= self.policy_version

    def _admissible_groups(self, request: WorkRequest) -> int:
        counts, batch = self._ledger.counts(), self._spec.batch
        accepted = counts.buffered + counts.consumed
        admissible = admissible_trajectories(
            admission_lag_steps=self.admission_lag_steps,
            # Nobody can hold what is not published yet.
            held_policy_version=min(request.held_policy_version, self.policy_version),
            batch_trajectories=batch.trajectories,
            accepted=accepted,
            in_flight=counts.in_flight,
            over_provision_ratio=batch.over_provision_ratio,
        )
        wanted = self._spec.steps * batch.trajectories - accepted - counts.in_flight
        quota = self._quotas.training(
            request.worker_id, request.rollout_group, budget=counts.in_flight + admissible
        )
        free = max(0, min(admissible, wanted, quota)) // batch.trajectories_per_prompt
        return min(free, request.max_trajectories // batch.trajectories_per_prompt)

    def _release_lost(self, request: WorkRequest) -> None:
        """Take back what the worker was granted and does not hold: it never heard of it."""
        for book in (self._ledger, self._round):
            if book is None or request.held_lease_ids is None:
                continue
            lost = [
                lease_id
                for lease_id in book.held_by(request.worker_id)
                if lease_id not in request.held_lease_ids
            ]
            if lost and book.release(request.worker_id, lost):
                self.notify()

    def _preempt_surplus(self) -> None:
        """Have cut what an over-provisioned run does not need now that a batch is complete."""
        if (ratio := self._spec.batch.over_provision_ratio) == 1.0:
            return
        counts = self._ledger.counts()
        surplus = surplus_trajectories(
            max_lag_steps=self._spec.algorithm.max_policy_lag_steps,
            policy_version=self.policy_version,
            batch_trajectories=self._spec.batch.trajectories,
            accepted=counts.buffered + counts.consumed,
            in_flight=counts.in_flight,
            over_provision_ratio=ratio,
        )
        self._ledger.preempt(surplus)

    def _oldest_partial_version(self) -> int:
        """The oldest version of a token that could still be trained on, in the very next batch."""
        return max(0, self._next_version() - self.admission_lag_steps)

    def _next_version(self) -> int:
        """The version that the next batch is applied to; during a step it is the one to come."""
        return self._ledger.counts().consumed // self._spec.batch.trajectories

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
        self._ledger.drop_late(
            policy_version=self._next_version(),
            max_lag_steps=self._spec.algorithm.max_policy_lag_steps,
            admission_lag_steps=self.admission_lag_steps,
        )
        expired = self._ledger.expire()
        if self._round is not None:
            expired += self._round.expire()
        for worker_id in expired:
            self._registry.mark_doubted(worker_id)
        if expired:
            self.notify()

    def _has_issued(self, lease_id: str) -> bool:
        """Whether a lease is this process's own; versions of the learner before went further."""
        in_round = self._round is not None and self._round.has_issued(lease_id)
        return in_round or self._ledger.has_issued(lease_id)

    def _check_versions(self, name: str, answers: Sequence[Trajectory | PartialResponse]) -> None:
        for index, answer in enumerate(answers):
            newest = max(span.policy_version for span in answer.version_spans)
            if newest > self.policy_version:
                field = f"{name}[{index}].version_spans"
                raise InvalidMessageError(field, newest, f"at most version {self.policy_version}")
