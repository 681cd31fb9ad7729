"""The dispatcher: which worker gets which prompt, and where its submissions go.

It connects the ledger (training), the evaluation round (held-out prompts), admission (how much work
is granted) and the worker registry. It never blocks, and the clock is injected.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.algo.health.guards import Rollbacks
from vcpo.api import VCPORunSpec
from vcpo.records.reasons import SetAsideCause
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.failures import Failure, FailureCause
from vcpo.wire.phase import RunPhase
from vcpo.wire.trajectory import PartialResponse, Trajectory
from vcpo.wire.v1 import work_pb2
from vcpo.wire.versions import step_of, version_of
from vcpo_learner.clock import Clock
from vcpo_learner.event_loop import ChangeNotifier
from vcpo_learner.ledger.admission import Admission, WorkRequest
from vcpo_learner.ledger.evaluation import EvaluationResult, EvaluationRound
from vcpo_learner.ledger.lag_limit import LagLimit
from vcpo_learner.ledger.lease import Lease, SubmitOutcome
from vcpo_learner.ledger.lease_book import LeaseBook
from vcpo_learner.ledger.ledger import TrajectoryLedger
from vcpo_learner.ledger.workers import FailureWatch, WorkerRegistry
from vcpo_learner.troubles import Troubles

_POLL_S = 1.0
"""Waiting loops run at least this often, because leases expire without a notification."""


class Dispatcher:
    """Grants leases, accepts submissions and hands batches to the training loop.

    Owner: the learner's event loop.
    """

    def __init__(
        self,
        *,
        spec: VCPORunSpec,
        ledger: TrajectoryLedger,
        registry: WorkerRegistry,
        troubles: Troubles,
        incarnation: str,
        clock: Clock,
    ) -> None:
        self.accepted_tokens = 0
        """Response tokens of accepted training trajectories."""
        self.failures = FailureWatch(spec, registry, clock, troubles)
        self.phase = RunPhase.RUNNING
        """Phase of the run; work is granted in `RUNNING` only."""
        self.policy_version = 0
        """Version of the learner's parameters."""
        self._spec = spec
        self._max_policy_lag_steps = spec.algorithm.max_policy_lag_steps
        self.ledger = ledger
        self._incarnation = incarnation
        self._clock = clock
        self.registry = registry
        self._troubles = troubles
        self._admission = Admission(spec, ledger)
        self._new_round = partial(EvaluationRound, spec, incarnation=incarnation, clock=clock)
        self._round = self._new_round(step=None)
        self._changed = ChangeNotifier()
        """Set when workers that wait should look again: work may be admissible."""
        self._arrived = ChangeNotifier()
        """Set when the training loop should look again. It is an event of its own, because a
        submission would wake all workers that wait for work, and hardly ever makes any
        admissible."""

    @property
    def step(self) -> int:
        return step_of(self.policy_version)

    @property
    def lag_limit(self) -> LagLimit:
        return self.ledger.lag_limit or LagLimit(steps=self._max_policy_lag_steps)

    @property
    def lag_limit_steps(self) -> int:
        return self.lag_limit_at(self.ledger.step)

    def lag_limit_at(self, step: int) -> int:
        return min(self._max_policy_lag_steps, self.lag_limit.in_force(step))

    def resume(self) -> None:
        self.policy_version = version_of(self.ledger.restarts, self.ledger.step)
        if self.step > 0:
            self.failures.record_success()

    def advance_version(self) -> None:
        self.policy_version += 1

    def drain(self) -> bool:
        return self._leave_running(RunPhase.DRAINING)

    def complete(self) -> bool:
        return self._leave_running(RunPhase.COMPLETE)

    def abort(self) -> None:
        self.phase = RunPhase.FAILED
        self.notify()

    def notify(self) -> None:
        self._changed.notify()
        self._arrived.notify()

    def throttle(self, lag_limit_steps: int) -> int:
        """Limit the lag of new work and of batches for the host; return the limit in force."""
        steps = min(lag_limit_steps, self._max_policy_lag_steps)
        guards = self._spec.health.guards
        self.ledger.record_lag_limit(self.lag_limit.set_by_host(steps, guards))
        self.notify()
        return self.lag_limit_steps

    def observe_health(self, level: WarningLevel, rollbacks: Rollbacks) -> None:
        guards = self._spec.health.guards
        self.ledger.record_lag_limit(self.lag_limit.after_step(level, rollbacks, guards))

    async def lease(self, request: WorkRequest, *, wait_s: float) -> list[Lease]:
        """Grant work to a worker; wait up to `wait_s` seconds until some is admissible.

        Returns an empty list at once

        * if the worker does not hold the newest version: it should fetch that version and ask
          again, because its request as a holder of the old version will hardly be granted;
        * if the worker is deregistered while it waits, because a host that saw it die relies on it
          getting no more work;
        * if the worker sends another request while it waits: it has given up this one.
        """
        deadline_s = self._clock() + wait_s
        worker_id = request.worker_id
        number = self.registry.record_request(
            worker_id,
            request.rollout_group,
            request.held_policy_version,
            process_id=request.process_id,
            peak_memory_bytes=request.peak_memory_bytes,
            weight_updates=request.weight_updates,
        )
        self._release_lost(request)
        while self.phase is RunPhase.RUNNING and self.registry.record_contact(
            worker_id, request_number=number
        ):
            self._expire()
            leases = self._grant(request)
            remaining_s = deadline_s - self._clock()
            if leases or not self._holds_newest(request) or remaining_s <= 0:
                return leases
            await self._changed.wait(min(remaining_s, _POLL_S))
        return []

    def submit(
        self,
        worker_id: str,
        lease_id: str,
        trajectories: Sequence[Trajectory],
        request: work_pb2.SubmitRequest | None = None,
    ) -> list[SubmitOutcome]:
        """Accept trajectories of a lease; a repeated submission changes nothing.

        request: what they were read from; None if they were not received.
        """
        self._check_versions(lease_id, "trajectories", trajectories)
        if self._round.leases.has_issued(lease_id):
            outcomes = self._round.submit(lease_id, trajectories)
        else:
            before = self.ledger.counts().dropped
            outcomes = self.ledger.submit(lease_id, trajectories, request)
            self._after_submission(trajectories, outcomes, before)
        num_accepted = outcomes.count(SubmitOutcome.ACCEPTED)
        if num_accepted:
            self.failures.record_success(worker_id)
        self.registry.record_contact(worker_id, num_accepted=num_accepted)
        self._arrived.notify()
        return outcomes

    def fail(self, worker_id: str, lease_id: str, failure: Failure) -> None:
        """End a lease whose generation failed; its prompt is granted again a few times.

        A prompt that is too long is given up at once. A worker that fails where others deliver is
        set aside.
        """
        book, fault = self._book_of(lease_id), None
        if book.has_issued(lease_id):  # not of a learner before
            granted_s = book.granted_s(lease_id)
            fault = self.failures.record_failure(worker_id, failure, granted_s=granted_s)
        self.registry.record_contact(worker_id)
        owner = self._round if book is self._round.leases else self.ledger
        owner.fail(lease_id, is_too_long=failure.cause is FailureCause.TOO_LONG)
        if fault is not None:
            self.set_aside(worker_id, SetAsideCause.FAILING, fault)
        self.notify()

    def release(
        self,
        worker_id: str,
        lease_ids: Sequence[str],
        partial_responses: Sequence[PartialResponse] = (),
    ) -> int:
        """End leases of a worker; if `lease_ids` is empty, end all and deregister the worker.

        partial_responses: what the worker sampled; only with exactly one lease. An evaluation round
            does not keep them.
        """
        if partial_responses:
            self._check_versions(lease_ids[0], "begun", partial_responses)
        released = self.ledger.release(worker_id, lease_ids, partial_responses)
        released += self._round.release(worker_id, lease_ids)
        if not lease_ids:
            self.registry.deregister(worker_id)
            self.failures.forget(worker_id)
        self.notify()
        return released

    def set_aside(self, worker_id: str, cause: SetAsideCause, message: str) -> None:
        """Take a worker's process out of the run; another one may work under its name.

        Its leases end, its buffered groups are dropped, and their prompts are granted again. Its
        next request for work is refused with the cause, it exits, and its host replaces it. What it
        began and released before is resumed by others and stays.

        message: what it did, as a clause without a full stop.
        """
        if worker_id not in self.registry and any(
            each.worker_id == worker_id for each in self.registry.latest_set_aside
        ):
            return
        self.ledger.set_aside(worker_id)
        self._round.release(worker_id, ())
        worker = self.registry.set_aside(worker_id, cause, message)
        self.failures.forget(worker_id)
        self._troubles.event("WorkerSetAside", f"{worker_id}: {worker.sentence}")
        self.notify()

    async def next_batch(self) -> list[Lease] | None:
        """Wait for one step's groups and consume them; None if the run is no longer `RUNNING`.

        Raises:
            TooManyFailuresError: if every generation fails.
            Exception: what ended the ledger's log: no version is announced any more.
        """
        while self.phase is RunPhase.RUNNING:
            self.failures.check()
            self.ledger.log.check()
            self._expire()
            batch = self.ledger.take_batch(
                step=self.step,
                max_policy_lag_steps=self._max_policy_lag_steps,
                lag_limit_steps=self.lag_limit_steps,
            )
            if batch is not None:
                self._preempt_surplus()
                self.notify()
                return batch
            await self._arrived.wait(_POLL_S)
        return None

    async def evaluate(self, step: int, *, exclusive: bool) -> EvaluationResult | None:
        """Run an evaluation round to its end, after the current round if there is one.

        exclusive: grant no training work during the round, and the round's prompts only to holders
            of the newest version, so that all responses come from one version.

        Returns None if no response arrived or the run left the phase `RUNNING`.

        Raises:
            TooManyFailuresError: if every generation fails before the first step. A later round
                gives up its prompts and ends; the failures of training decide about the run.
        """
        while self._round.is_running:
            if self.phase is not RunPhase.RUNNING:
                return None
            await self._arrived.wait(_POLL_S)
        current = self._round = self._new_round(step=step, is_exclusive=exclusive)
        self.notify()
        try:
            while not current.done and self.phase is RunPhase.RUNNING:
                if step == 0:
                    self.failures.check()
                self._expire()
                await self._arrived.wait(_POLL_S)
        finally:
            self._round = self._new_round(step=None)
            self.notify()
        return current.result() if current.done else None

    async def wait_until_idle(self, timeout_s: float) -> None:
        deadline_s = self._clock() + timeout_s
        while self.ledger.counts().in_flight and (left := deadline_s - self._clock()) > 0:
            await self._arrived.wait(min(left, _POLL_S))

    def _after_submission(
        self,
        trajectories: Sequence[Trajectory],
        outcomes: Sequence[SubmitOutcome],
        dropped_before: Mapping[str, int],
    ) -> None:
        """Count what the ledger accepted; wake the workers if that makes work admissible."""
        for trajectory, outcome in zip(trajectories, outcomes, strict=True):
            if outcome is SubmitOutcome.ACCEPTED:
                self.accepted_tokens += trajectory.num_sampled_tokens
        counts = self.ledger.counts()
        if counts.buffered >= self._spec.batch.trajectories:
            self._preempt_surplus()
        if counts.dropped != dropped_before:
            self._changed.notify()

    def _book_of(self, lease_id: str) -> LeaseBook:
        book = self._round.leases
        return book if book.has_issued(lease_id) else self.ledger.leases

    def _leave_running(self, phase: RunPhase) -> bool:
        if self.phase is not RunPhase.RUNNING:
            return False
        self.phase = phase
        self.notify()
        return True

    def _grant(self, request: WorkRequest) -> list[Lease]:
        """Grant what is admissible now: evaluation prompts first, then training prompts."""
        current = self._round
        if request.incarnation != self._incarnation:
            return []
        if current.is_exclusive and not self._holds_newest(request):
            return []
        if self.failures.must_wait(request.worker_id):
            return []
        leases = self._admission.grant(
            request,
            current,
            policy_version=self.policy_version,
            lag_limit_steps=self.lag_limit_steps,
        )
        for lease in leases:
            lease.held_version = min(request.held_policy_version, self.policy_version)
        return leases

    def _holds_newest(self, request: WorkRequest) -> bool:
        is_ours = request.incarnation == self._incarnation
        return is_ours and request.held_policy_version >= self.policy_version

    def _release_lost(self, request: WorkRequest) -> None:
        if request.held_lease_ids is None:
            return
        for owner in (self.ledger, self._round):
            held = (lease.lease_id for lease in owner.leases.held_by(request.worker_id))
            lost = [lease_id for lease_id in held if lease_id not in request.held_lease_ids]
            if lost and owner.release(request.worker_id, lost):
                self.notify()

    def _preempt_surplus(self) -> None:
        surplus = self._admission.surplus_trajectories(self.step)
        if surplus > 0:
            self.ledger.preempt(surplus)

    def _expire(self) -> None:
        self.ledger.drop_late(
            step=self.ledger.step,
            max_policy_lag_steps=self._max_policy_lag_steps,
            lag_limit_steps=self.lag_limit_steps,
        )
        expired = self.ledger.expire() + self._round.expire()
        for worker_id in expired:
            self.failures.record_expired(worker_id)
        if expired:
            self.notify()

    def _check_versions(
        self, lease_id: str, name: str, responses: Sequence[Trajectory | PartialResponse]
    ) -> None:
        """Check that no token is labelled with a version that its worker cannot have had.

        That is one to come, or one before what it held when it asked for the lease, unless it
        resumes older tokens. Nothing of a lease that is not open is accepted.
        """
        if (lease := self._book_of(lease_id).get(lease_id)) is None:
            return
        for index, response in enumerate(responses):
            field = f"{name}[{index}].version_spans"
            versions = [span.policy_version for span in response.version_spans]
            if (newest := max(versions)) > self.policy_version:
                raise InvalidMessageError(field, newest, f"at most version {self.policy_version}")
            if (oldest := min(versions)) < lease.oldest_version:
                requirement = f"at least version {lease.oldest_version}, which the worker held"
                raise InvalidMessageError(field, oldest, requirement)
