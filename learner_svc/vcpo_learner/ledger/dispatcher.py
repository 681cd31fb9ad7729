"""The dispatcher: which worker gets which prompt, and where its submissions go.

It connects the ledger (training), the evaluation round (held-out prompts), admission (how much work
is granted) and the worker registry. It never blocks, and the clock is injected.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from vcpo.api import VCPORunSpec
from vcpo.control.quota import Trust
from vcpo.records.reasons import SetAsideCause
from vcpo.records.weight_updates import WeightUpdates
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.failures import Failure, FailureCause
from vcpo.wire.phase import RunPhase
from vcpo.wire.trajectory import PartialResponse, Trajectory
from vcpo.wire.v1 import work_pb2
from vcpo_learner.change_notifier import ChangeNotifier
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.admission import Admission
from vcpo_learner.ledger.assignments import Assignment, Purpose, WorkRequest
from vcpo_learner.ledger.changes import LogRoom
from vcpo_learner.ledger.evaluation import EvaluationResult, EvaluationRounds
from vcpo_learner.ledger.failure_watch import FailureWatch
from vcpo_learner.ledger.groups import Group
from vcpo_learner.ledger.lag_limit import LagLimit
from vcpo_learner.ledger.leases import SubmitOutcome
from vcpo_learner.ledger.set_aside import SetAsideWorker, SetAsideWorkers
from vcpo_learner.ledger.trajectory_ledger import TrajectoryLedger
from vcpo_learner.ledger.worker_registry import (
    RegisteredWorker,
    WorkerCounters,
    WorkerRegistry,
    max_workers,
)

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
        incarnation: str,
        clock: Clock,
    ) -> None:
        self.accepted_tokens = 0
        """Response tokens of accepted training trajectories."""
        self.accepted_trajectories = 0
        """Training trajectories accepted since the start; what is dropped later counts as well."""
        self.failures = FailureWatch(spec, registry, clock, holds_lease=self._holds_lease)
        self.set_aside_workers = SetAsideWorkers(max_workers=max_workers(spec))
        self._phase = RunPhase.RUNNING
        self._policy_version = 0
        self.lag_limit = LagLimit(spec)
        self._spec = spec
        self._ledger = ledger
        self._incarnation = incarnation
        self._clock = clock
        self._registry = registry
        self._admission = Admission(spec, ledger, registry)
        self._weight_updates = WorkerCounters(max_workers=4 * max_workers(spec))
        self._evaluations = EvaluationRounds(spec, incarnation=incarnation, clock=clock)
        self._changed = ChangeNotifier()
        """What workers wait for: work may be admissible, or a lease be preempted."""
        self._arrived = ChangeNotifier()
        """What the training loop waits for. Apart, because a submission would wake all workers that
        wait for work, and hardly ever makes any admissible."""

    @property
    def phase(self) -> RunPhase:
        """Phase of the run; work is granted in `RUNNING` only."""
        return self._phase

    @property
    def policy_version(self) -> int:
        """Version of the learner's parameters, equal to the optimizer steps taken."""
        return self._policy_version

    @property
    def admission_lag_steps(self) -> int:
        """Lag limit for new work, in policy versions; at most the run's lag bound."""
        return self.lag_limit.steps

    @property
    def ledger(self) -> TrajectoryLedger:
        """The training trajectories."""
        return self._ledger

    def workers(self) -> list[RegisteredWorker]:
        """Return the workers that have asked for work and are not lost."""
        return self._registry.workers()

    def is_known(self, worker_id: str) -> bool:
        """Return whether a worker is registered and not lost, or holds leases."""
        return self._registry.is_alive(worker_id) or self._holds_lease(worker_id)

    def holder_of(self, lease_id: str) -> str | None:
        """Return the worker of an open lease, of training or evaluation; None if it is not open."""
        return (self._evaluations.of_lease(lease_id) or self._ledger).holder_of(lease_id)

    def weight_updates(self) -> WeightUpdates:
        """Count the versions that workers took, over all workers."""
        return self._weight_updates.total

    def resume_at(self, policy_version: int) -> None:
        """Continue a run that has taken `policy_version` steps."""
        self._policy_version = policy_version
        if policy_version > 0:
            self.failures.record_success()

    def advance_version(self) -> None:
        """Count an optimizer step; call `notify` after the new version is published."""
        self._policy_version += 1

    def drain(self) -> bool:
        """Stop granting work; return False if the run is not in the phase `RUNNING`."""
        return self._leave_running(RunPhase.DRAINING)

    def complete(self) -> bool:
        """Record that all steps were taken; return False if the run is not in `RUNNING`."""
        return self._leave_running(RunPhase.COMPLETE)

    def abort(self) -> None:
        """Record that the run failed."""
        self._phase = RunPhase.FAILED
        self.notify()

    def notify(self) -> None:
        """Wake everything that waits."""
        self._changed.notify()
        self._arrived.notify()

    def throttle(self, admission_lag_steps: int) -> int:
        """Limit the lag of new work and of batches for the host; return the limit in force."""
        in_force = self.lag_limit.set(admission_lag_steps)
        self.record_lag_limit()
        self.notify()
        return in_force

    def record_lag_limit(self) -> None:
        """Let the ledger hold what `lag_limit` was left at, for the learner after this one."""
        self._ledger.record_lag_limit(self.lag_limit.left)

    async def lease(self, request: WorkRequest, *, wait_s: float) -> list[Assignment]:
        """Grant work to a worker; wait up to `wait_s` seconds until some is admissible.

        Returns an empty list at once

        * if the worker does not hold the newest version: it should fetch that version and ask
          again, because its request as a holder of the old version will hardly be granted;
        * if the worker is deregistered while it waits, because a host that saw it die relies on it
          getting no more work;
        * if the worker sends another request while it waits: it has given up this one;
        * if the worker was set aside.
        """
        deadline_s = self._clock() + wait_s
        worker_id = request.worker_id
        if worker_id in self.set_aside_workers:
            return []
        number = self._registry.record_request(
            worker_id,
            request.rollout_group,
            request.held_policy_version,
            peak_memory_bytes=request.peak_memory_bytes,
        )
        self._weight_updates.set(worker_id, request.weight_updates)
        self._release_lost(request)
        while self._phase is RunPhase.RUNNING and self._registry.record_contact(
            worker_id, request_number=number
        ):
            self._expire()
            assignments = self._grant(request)
            remaining_s = deadline_s - self._clock()
            if assignments or not self._holds_newest(request) or remaining_s <= 0:
                return assignments
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

        Raises:
            InvalidMessageError: if a trajectory does not belong to the lease, or a token is
                labelled with a version that does not exist yet.
        """
        self._check_versions(lease_id, "trajectories", trajectories)
        if (evaluation := self._evaluations.of_lease(lease_id)) is not None:
            outcomes = evaluation.submit(lease_id, trajectories)
        else:
            outcomes = self._submit_for_training(lease_id, trajectories, request)
        num_accepted = outcomes.count(SubmitOutcome.ACCEPTED)
        if num_accepted:
            self.failures.record_success(worker_id)
            if self._registry.trust_of(worker_id) is not Trust.TRUSTED:  # now all may hold more
                self._changed.notify()
        self._registry.record_contact(worker_id, num_accepted=num_accepted)
        self._arrived.notify()
        return outcomes

    async def wait_for_preemptions(
        self, worker_id: str, known_lease_ids: Collection[str], *, wait_s: float
    ) -> list[str]:
        """Return a worker's preempted leases; wait up to `wait_s` for one that it does not know."""
        deadline_s = self._clock() + wait_s
        while True:
            lease_ids = self._ledger.preempted_leases(worker_id)
            remaining_s = deadline_s - self._clock()
            if remaining_s <= 0 or not set(lease_ids).issubset(known_lease_ids):
                return lease_ids
            await self._changed.wait(min(remaining_s, _POLL_S))

    def fail(self, worker_id: str, lease_id: str, failure: Failure) -> None:
        """End a lease whose generation failed; its prompt is granted again a few times.

        A prompt that is too long is given up at once. A worker that fails where others deliver is
        set aside.
        """
        evaluation = self._evaluations.of_lease(lease_id)
        book = evaluation or self._ledger
        if evaluation is not None or self._ledger.has_issued(lease_id):  # not of a learner before
            granted_s = book.granted_s(lease_id)
            self.failures.record_failure(worker_id, failure, granted_s=granted_s)
        self._registry.record_contact(worker_id)
        book.fail(lease_id, is_too_long=failure.cause is FailureCause.TOO_LONG)
        if (fault := self.failures.fault_of(worker_id, failure)) is not None:
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

        Raises:
            InvalidMessageError: if there are too many partial responses, or a token is labelled
                with a version that does not exist yet.
        """
        if partial_responses:
            self._check_versions(lease_ids[0], "begun", partial_responses)
        released = self._ledger.release(worker_id, lease_ids, partial_responses)
        released += self._evaluations.release(worker_id, lease_ids)
        if not lease_ids:
            self._registry.deregister(worker_id)
            self.failures.forget(worker_id)
        self.notify()
        return released

    def set_aside(self, worker_id: str, cause: SetAsideCause, message: str) -> None:
        """Take a worker out of the run, until another process works under its name.

        Its leases end, its buffered groups are dropped, and their prompts are granted again. Its
        next call is refused with the cause (`vcpo_learner.services.callers`), it exits, and its
        host replaces it. What it began and released before is resumed by others and stays.

        message: what it did, as a clause without a full stop.
        """
        if worker_id in self.set_aside_workers:
            return
        self._ledger.set_aside(worker_id)
        self._evaluations.release(worker_id, ())
        known = {each.worker_id: each.rollout_group for each in self._registry.workers()}
        self._registry.deregister(worker_id)
        self.failures.forget(worker_id)
        self.set_aside_workers.add(
            SetAsideWorker(
                worker_id=worker_id,
                rollout_group=known.get(worker_id, ""),
                cause=cause,
                message=message,
                time_s=self._clock(),
            )
        )
        self.notify()

    async def next_batch(self) -> list[Group] | None:
        """Wait for one step's groups and consume them; None if the run is no longer `RUNNING`.

        Raises:
            TooManyFailuresError: if every generation fails. What ended the redo log, as well: no
                version is announced any more, so no batch may ever come.
        """
        while self._phase is RunPhase.RUNNING:
            self.failures.check()
            self._ledger.log.check()
            self._expire()
            batch = self._ledger.take_batch(
                policy_version=self._policy_version,
                max_lag_steps=self._spec.algorithm.max_policy_lag_steps,
                admission_lag_steps=self.admission_lag_steps,
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
        while self._evaluations.current is not None:
            if self._phase is not RunPhase.RUNNING:
                return None
            await self._arrived.wait(_POLL_S)
        current = self._evaluations.begin(step, exclusive=exclusive)
        self.notify()
        try:
            while not current.done and self._phase is RunPhase.RUNNING:
                if step == 0:
                    self.failures.check()
                self._expire()
                await self._arrived.wait(_POLL_S)
        finally:
            self._evaluations.end()
            self.notify()
        return current.result() if current.done else None

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until nothing is in flight, at most `timeout_s` seconds."""
        deadline_s = self._clock() + timeout_s
        while self._ledger.counts().in_flight and (left := deadline_s - self._clock()) > 0:
            await self._arrived.wait(min(left, _POLL_S))

    def _submit_for_training(
        self,
        lease_id: str,
        trajectories: Sequence[Trajectory],
        request: work_pb2.SubmitRequest | None,
    ) -> list[SubmitOutcome]:
        """Pass trajectories to the ledger; wake the workers if that makes work admissible."""
        before = self._ledger.counts()
        outcomes = self._ledger.submit(lease_id, trajectories, request)
        accepted = [
            trajectory
            for trajectory, outcome in zip(trajectories, outcomes, strict=True)
            if outcome is SubmitOutcome.ACCEPTED
        ]
        self.accepted_trajectories += len(accepted)
        self.accepted_tokens += sum(each.num_sampled_tokens for each in accepted)
        after = self._ledger.counts()
        is_preempted = after.buffered >= self._spec.batch.trajectories and self._preempt_surplus()
        if is_preempted or after.dropped != before.dropped:
            self._changed.notify()
        return outcomes

    def _leave_running(self, phase: RunPhase) -> bool:
        if self._phase is not RunPhase.RUNNING:
            return False
        self._phase = phase
        self.notify()
        return True

    def _grant(self, request: WorkRequest) -> list[Assignment]:
        """Grant what is admissible now: evaluation prompts first, then training prompts.

        A log that cannot be written stops training work; a full one leaves what one step needs.
        """
        if request.incarnation != self._incarnation:
            return []
        evaluation, is_exclusive = self._evaluations.current, self._evaluations.is_exclusive
        if is_exclusive and not self._holds_newest(request):
            return []
        if (most := self.failures.max_groups(request.worker_id)) is not None:
            if most == 0 or self._holds_lease(request.worker_id):
                return []
            group = most * self._spec.batch.trajectories_per_prompt
            request = replace(request, max_trajectories=min(group, request.max_trajectories))
        if evaluation is not None and (
            leases := evaluation.grant(
                request.worker_id,
                max_trajectories=self._admission.evaluation_responses(request, evaluation),
                policy_version=self._policy_version,
            )
        ):
            return [Assignment(purpose=Purpose.EVALUATION, lease=lease) for lease in leases]
        room = self._ledger.log.room
        if is_exclusive or room is LogRoom.UNWRITABLE:
            return []
        leases = self._ledger.grant(
            request.worker_id,
            num_groups=self._admission.training_groups(
                request,
                policy_version=self._policy_version,
                admission_lag_steps=0 if room is LogRoom.FULL else self.admission_lag_steps,
            ),
            policy_version=self._policy_version,
            # An older token could not be trained on, not even in the very next batch.
            oldest_partial_version=max(0, self._next_version() - self.admission_lag_steps),
        )
        return [Assignment(purpose=Purpose.TRAIN, lease=lease) for lease in leases]

    def _holds_lease(self, worker_id: str) -> bool:
        return bool(self._ledger.held_by(worker_id) or self._evaluations.held_by(worker_id))

    def _holds_newest(self, request: WorkRequest) -> bool:
        is_ours = request.incarnation == self._incarnation
        return is_ours and request.held_policy_version >= self._policy_version

    def _release_lost(self, request: WorkRequest) -> None:
        """End the leases that were granted to the worker and that it does not know of."""
        if request.held_lease_ids is None:
            return
        for book in (self._ledger, self._evaluations):
            lost = [
                lease_id
                for lease_id in book.held_by(request.worker_id)
                if lease_id not in request.held_lease_ids
            ]
            if lost and book.release(request.worker_id, lost):
                self.notify()

    def _preempt_surplus(self) -> bool:
        """Preempt what an over-provisioned run does not need now that a batch is complete.

        Returns whether there is any.
        """
        surplus = self._admission.surplus_trajectories(self._policy_version)
        if surplus > 0:
            self._ledger.preempt(surplus)
        return surplus > 0

    def _next_version(self) -> int:
        """Return the version that the next batch is applied to, also during a step or a redo."""
        return self._ledger.counts().consumed // self._spec.batch.trajectories

    def _expire(self) -> None:
        """Drop late groups, end expired leases, and mark their workers as doubted."""
        self._ledger.drop_late(
            policy_version=self._next_version(),
            max_lag_steps=self._spec.algorithm.max_policy_lag_steps,
            admission_lag_steps=self.admission_lag_steps,
        )
        expired = self._ledger.expire() + self._evaluations.expire()
        for worker_id in expired:
            self._registry.mark_doubted(worker_id)
        if expired:
            self.notify()

    def _check_versions(
        self, lease_id: str, name: str, responses: Sequence[Trajectory | PartialResponse]
    ) -> None:
        """Check that no token is labelled with a version that does not exist yet.

        While steps are redone, a lease may carry tokens of versions that are not redone yet: the
        learner before had announced them. Nothing of a lease that is not open is accepted.
        """
        if self.holder_of(lease_id) is None:
            return
        most = max(self._policy_version, self._ledger.newest_resumed_version(lease_id))
        for index, response in enumerate(responses):
            if (newest := response.newest_policy_version) > most:
                field = f"{name}[{index}].version_spans"
                raise InvalidMessageError(field, newest, f"at most version {most}")
