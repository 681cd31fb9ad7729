"""The ledger: the state of every training trajectory, from its lease to its end.

```
            grant                 the whole group arrived           take_batch
   prompt --------->  in flight  -------------------------> buffered ----------> consumed
     ^                    |                                     |
     |                    | expired, failed, released           | beyond the lag bound
     |                    | worker set aside                    | worker set aside
     +--------------------+------------- dropped <--------------+
       requeued, until `max_attempts`
```

Invariants, checked by `counts().check()` at every step:

* leased = in flight + buffered + consumed + dropped, and each drop has a reason. A prompt that is
  granted again is leased again.
* A batch holds no token beyond the lag bound at the version that consumes it. Admission makes late
  groups rare (`vcpo.control.admission`); `drop_late` removes the remaining ones. A throttled limit
  holds in the same way from the moment it is set.
* A lease closes once, so a trajectory is accepted at most once.

The unit is the prompt group. A group is trained on as a whole or dropped as a whole, because a
baseline over part of a group depends on which part was lost.

If a lease is released or expires, its prompt is requeued with the partial responses, and the next
lease resumes them. If a generation fails, they are discarded, because they may be the cause.

With dynamic sampling (DAPO) a group of equal rewards is dropped when it arrives, and its prompt is
not requeued. Admission does not count such a group, so other prompts are granted in its place.

This module decides. What it decides is a change (`vcpo_learner.ledger.changes`): it is applied to
the contents (`vcpo_learner.ledger.contents`) and appended to the redo log, from which
`vcpo_learner.redo_log` makes the same contents in another process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from vcpo.algo import GroupFilter
from vcpo.records.reasons import DropReason
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.limits import MAX_PARTIAL_TOKENS
from vcpo.wire.trajectory import PartialResponse, Trajectory
from vcpo.wire.v1 import ledger_pb2, work_pb2
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.accounting import TrajectoryCounts
from vcpo_learner.ledger.changes import (
    BatchConsumed,
    ChangeLog,
    Evaluated,
    GroupsDropped,
    LagLimitLeft,
    LearnerRestarted,
    LeaseEnded,
    LeaseGranted,
    NoLog,
    RolledBack,
    TrajectoriesAccepted,
    VersionPublished,
)
from vcpo_learner.ledger.contents import LedgerContents, LedgerState, RecordedStep
from vcpo_learner.ledger.groups import Group, newest_trajectories
from vcpo_learner.ledger.leases import LeaseBook, OpenLease, SubmitOutcome
from vcpo_learner.prompts.source import PromptSource, SequentialPrompts


class TrajectoryLedger:
    """The training trajectories of one run, in memory. Owner: the learner's event loop."""

    def __init__(
        self,
        *,
        prompts_per_step: int,
        trajectories_per_prompt: int,
        lease_timeout_s: float,
        max_attempts: int,
        incarnation: str,
        clock: Clock,
        group_filter: GroupFilter = GroupFilter.NONE,
        prompt_source: PromptSource | None = None,
        log: ChangeLog | None = None,
    ) -> None:
        """Create an empty ledger.

        prompt_source: chooses new prompts; None counts upwards.
        log: keeps the changes for the next process; None keeps none.
        """
        self._trajectories_per_prompt = trajectories_per_prompt
        self._incarnation = incarnation
        self._log = NoLog() if log is None else log
        self._book = LeaseBook(
            prefix=f"train-{incarnation}", timeout_s=lease_timeout_s, clock=clock
        )
        self.contents = LedgerContents(
            prompts_per_step=prompts_per_step,
            trajectories_per_prompt=trajectories_per_prompt,
            max_attempts=max_attempts,
            group_filter=group_filter,
            source=SequentialPrompts() if prompt_source is None else prompt_source,
            book=self._book,
        )
        """Where every trajectory is; changed here and by a redo only."""

    @property
    def log(self) -> ChangeLog:
        """Where the changes are kept."""
        return self._log

    def counts(self) -> TrajectoryCounts:
        """Count all trajectories; accepted ones of an incomplete group count as buffered."""
        return self.contents.counts()

    def wasted_tokens(self) -> Mapping[str, int]:
        """Return the sampled tokens that arrived and were dropped since the start, by reason.

        A partial response is wasted when it is discarded, not when it is requeued. A trajectory
        that arrives after the end of its lease counts as `LEASE_EXPIRED`, each time it arrives.
        """
        return dict(self.contents.wasted_tokens)

    def in_flight_by_worker(self) -> Mapping[str, int]:
        """Count the leased trajectories that have not arrived, by worker."""
        return self._book.in_flight_by_worker()

    def grant(
        self,
        worker_id: str,
        *,
        num_groups: int,
        policy_version: int,
        oldest_partial_version: int = 0,
    ) -> list[OpenLease]:
        """Lease `num_groups` prompts: requeued ones first, then new ones of the prompt source.

        Returns fewer leases if the source has no prompt to give (its whole pool is in flight), or
        if the partial responses of all leases would exceed `MAX_PARTIAL_TOKENS`. Discards partial
        responses and kept trajectories with a token older than `oldest_partial_version`.
        """
        leases: list[OpenLease] = []
        num_partial_tokens = 0
        while len(leases) < num_groups:
            requeued = next(iter(self.contents.requeued), None)
            number = None
            if requeued is not None:
                prompt = requeued.without_tokens_before(oldest_partial_version)
                num_partial_tokens += prompt.num_partial_tokens
                if num_partial_tokens > MAX_PARTIAL_TOKENS and leases:
                    break
                prompt_index, number = prompt.prompt_index, prompt.grant_number
            else:
                chosen = self.contents.source.next_prompt(self.contents.book.prompts())
                if chosen is None:
                    break
                prompt_index = chosen
            number = self._book.next_grant_number if number is None else number
            change = LeaseGranted(
                lease_id=self._book.new_lease_id(),
                worker_id=worker_id,
                grant_number=number,
                prompt_index=prompt_index,
                policy_version=policy_version,
                oldest_version=oldest_partial_version,
                is_requeued=requeued is not None,
            )
            leases.append(self.contents.grant(change))
            self._log.append(change)
        return leases

    def num_groups_within(self, num_trajectories: int) -> int:
        """Return how many prompts may be granted next if at most so many trajectories may be.

        A requeued prompt with kept trajectories asks for the missing ones only.
        """
        number, left = 0, num_trajectories
        for prompt in self.contents.requeued:
            missing = self._trajectories_per_prompt - len(prompt.kept)
            if not prompt.kept or missing > left:
                break
            number, left = number + 1, left - missing
        return number + max(0, left) // self._trajectories_per_prompt

    def has_issued(self, lease_id: str) -> bool:
        """Return whether the id has the form of this ledger's leases, open or closed."""
        return self._book.has_issued(lease_id)

    def submit(
        self,
        lease_id: str,
        trajectories: Sequence[Trajectory],
        request: work_pb2.SubmitRequest | None = None,
    ) -> list[SubmitOutcome]:
        """Accept trajectories; a repeated submission changes nothing.

        request: what they were read from; None if they were not received.

        Raises:
            InvalidMessageError: if a trajectory does not belong to the lease.
        """
        change = TrajectoriesAccepted(
            lease_id=lease_id, trajectories=tuple(trajectories), request=request
        )
        outcomes = self.contents.accept(change)
        if SubmitOutcome.ACCEPTED in outcomes:
            self._log.append(change)
        for trajectory, outcome in zip(trajectories, outcomes, strict=True):
            if outcome is SubmitOutcome.LEASE_ENDED:
                self.contents.waste(trajectory.num_sampled_tokens, DropReason.LEASE_EXPIRED)
        return outcomes

    def fail(self, lease_id: str, *, is_too_long: bool = False) -> None:
        """End a lease whose generation failed; do nothing if it is not open.

        is_too_long: whether its prompt never fits; then it is given up at once.
        """
        if self._book.get(lease_id) is not None:
            reason = DropReason.PROMPT_TOO_LONG if is_too_long else DropReason.GENERATION_FAILED
            self._end(lease_id, reason)

    def release(
        self,
        worker_id: str,
        lease_ids: Sequence[str],
        partial_responses: Sequence[PartialResponse] = (),
    ) -> int:
        """End open leases of one worker, or all of them if `lease_ids` is empty; return how many.

        partial_responses: what the worker sampled; only with exactly one lease. If empty, the
            prompt keeps the partial responses that it was leased with.

        Raises:
            InvalidMessageError: if there are more partial responses than trajectories in a lease,
                or they are not those of its numbers.
        """
        most, number = self._trajectories_per_prompt, len(partial_responses)
        if number > most:
            raise InvalidMessageError("begun", f"{number} responses", f"at most {most} responses")
        leases = self._book.held_by(worker_id, lease_ids)
        if partial_responses and leases:
            leases[0].check_partial_responses(partial_responses)
        for lease in leases:
            reason = DropReason.SURPLUS if lease.preempted else DropReason.RELEASED
            self._end(lease.lease_id, reason, partial_responses)
        return len(leases)

    def set_aside(self, worker_id: str) -> None:
        """End the leases of a worker and drop its buffered groups; their prompts are requeued."""
        for lease in self._book.held_by(worker_id):
            self._end(lease.lease_id, DropReason.WORKER_SET_ASIDE)
        groups = (one for one in self.contents.buffer.groups() if worker_id in one.workers)
        self._drop_groups([one.lease_id for one in groups], DropReason.WORKER_SET_ASIDE)

    def held_by(self, worker_id: str) -> list[str]:
        """Return the open leases of a worker, oldest first."""
        return [lease.lease_id for lease in self._book.held_by(worker_id)]

    def granted_s(self, lease_id: str) -> float:
        """Return when an open lease was granted; infinitely early if it is not open."""
        return self._book.granted_s(lease_id)

    def holder_of(self, lease_id: str) -> str | None:
        """Return the worker of an open lease; None if it is not open."""
        return self._book.holder_of(lease_id)

    def newest_resumed_version(self, lease_id: str) -> int:
        """Return the newest version of a token that a lease carries; 0 without one or if closed."""
        lease = self._book.get(lease_id)
        return 0 if lease is None else lease.newest_resumed_version

    def expire(self) -> list[str]:
        """End the leases whose time is over; return the worker of each."""
        leases = self._book.expired_leases()
        for lease in leases:
            self._end(lease.lease_id, DropReason.LEASE_EXPIRED)
        return [lease.worker_id for lease in leases]

    def take_batch(
        self, *, policy_version: int, max_lag_steps: int, admission_lag_steps: int | None = None
    ) -> list[Group] | None:
        """Consume the groups of one step, oldest tokens first; return None if there are too few.

        Drops late groups first, see `drop_late`. `record_step` or `return_batch` must follow: the
        log does not know of the batch before.
        """
        self.drop_late(
            policy_version=policy_version,
            max_lag_steps=max_lag_steps,
            admission_lag_steps=admission_lag_steps,
        )
        batch = self.contents.buffer.take_batch()
        if batch is not None:
            self.contents.consumed += sum(len(group.trajectories) for group in batch)
        return batch

    def return_batch(self, batch: Sequence[Group]) -> None:
        """Buffer a batch again after a step that was not taken; it no longer counts as consumed."""
        self.contents.consumed -= sum(len(group.trajectories) for group in batch)
        self.contents.buffer.add(batch)

    def record_step(
        self, batch: Sequence[Group], *, policy_version: int, fresh: Sequence[Trajectory]
    ) -> None:
        """Log the step that was taken, or skipped, on a batch of `take_batch`.

        fresh: trajectories beside the batch that calibrated it.
        """
        self._log.append(
            BatchConsumed(
                policy_version=policy_version,
                lease_ids=tuple(group.lease_id for group in batch),
                fresh_trajectory_ids=tuple(each.trajectory_id for each in fresh),
            )
        )

    def record_version(self, version: VersionPublished) -> None:
        """Log a version that is about to be announced."""
        self._log.append(version)

    def record_evaluation(self, step: int, accuracy: float) -> None:
        """Keep the result of an evaluation that began after so many steps."""
        change = Evaluated(step=step, accuracy=accuracy)
        self.contents.note(change)
        self._log.append(change)

    def record_lag_limit(self, left: LagLimitLeft) -> None:
        """Keep what the lag limit was left at."""
        if left != self.contents.lag_limit:
            self.contents.note(left)
            self._log.append(left)

    def quarantine(self, lease_ids: Collection[str]) -> list[Group]:
        """Drop buffered groups on which no step can be taken, and return them.

        Their prompts are not requeued, because the prompt may be what breaks the update.
        """
        buffered = [group.lease_id for group in self.contents.buffer.groups()]
        excluded = [lease_id for lease_id in buffered if lease_id in lease_ids]
        return self._drop_groups(excluded, DropReason.QUARANTINED)

    def newest_trajectories(self, policy_version: int, *, num_tokens: int) -> list[Trajectory]:
        """Return arrived trajectories that hold `num_tokens` tokens of a version; all if too few.

        The trajectories stay in the ledger. One of every prompt comes before a second of any.
        """
        return newest_trajectories(
            list(self.contents.accepted()), policy_version=policy_version, num_tokens=num_tokens
        )

    def drop_late(
        self, *, policy_version: int, max_lag_steps: int, admission_lag_steps: int | None = None
    ) -> None:
        """Drop the groups that exceed the lag bound when their turn comes; requeue their prompts.

        A late group in the buffer counts against admission. If it stayed there until its turn,
        admission would grant no work in its place, and the learner would wait for data.

        policy_version: version that the next batch is applied to.
        admission_lag_steps: throttled limit, if it is below the run's own `max_lag_steps`.
        """
        self._drop_beyond(max_lag_steps, policy_version, DropReason.LAG_EXCEEDED)
        if admission_lag_steps is not None:
            self._drop_beyond(admission_lag_steps, policy_version, DropReason.THROTTLED)

    def preempt(self, num_trajectories: int) -> None:
        """Mark the newest open leases as preempted, up to `num_trajectories` missing trajectories.

        Preempts whole leases, and never more than asked for. A lease that was preempted before and
        is still open counts towards the number.
        """
        leases = sorted(
            self._book.all(),
            key=lambda lease: (lease.preempted, lease.oldest_policy_version, lease.grant_number),
            reverse=True,
        )
        for lease in leases:
            num_trajectories -= lease.num_missing
            if num_trajectories < 0:
                break
            lease.preempted = True

    def preempted_leases(self, worker_id: str) -> list[str]:
        """Return the open leases that a worker is to interrupt and release, oldest first."""
        return [lease.lease_id for lease in self._book.held_by(worker_id) if lease.preempted]

    def snapshot(self) -> LedgerState:
        """Return what a checkpoint keeps: all contents, and where the log goes on from there."""
        return self.contents.snapshot(self._log.position)

    def restore(self, parts: Sequence[ledger_pb2.LedgerSnapshot]) -> None:
        """Continue from the parts of a snapshot; only before the first grant.

        Raises:
            InvalidMessageError: naming the first invalid field.
        """
        self.contents.restore(parts)

    def restart(self) -> None:
        """Begin as a new process with the contents of one that stopped: its leases end."""
        self.contents.restart()
        self._log.append(LearnerRestarted(incarnation=self._incarnation))

    def roll_back(self, policy_version: int, returned_steps: Iterable[RecordedStep] = ()) -> None:
        """Go back to a version: what later versions sampled is dropped, and so is what they used.

        returned_steps: all later steps; if given, their groups are buffered again instead, but for
            those with tokens of later versions.
        """
        steps = tuple(returned_steps)
        change = RolledBack(policy_version=policy_version, returns_groups=bool(steps))
        self.contents.roll_back(change, steps)
        self._log.append(change)

    def _drop_beyond(self, lag_steps: int, policy_version: int, reason: DropReason) -> None:
        """Drop the groups that a lag limit leaves no time for, and requeue their prompts."""
        late = self.contents.buffer.late(policy_version=policy_version, max_lag_steps=lag_steps)
        self._drop_groups([group.lease_id for group in late], reason)

    def _drop_groups(self, lease_ids: Sequence[str], reason: DropReason) -> list[Group]:
        if not lease_ids:
            return []
        change = GroupsDropped(lease_ids=tuple(lease_ids), reason=reason)
        groups = self.contents.drop(change)
        self._log.append(change)
        return groups

    def _end(
        self,
        lease_id: str,
        reason: DropReason,
        partial_responses: Sequence[PartialResponse] = (),
    ) -> None:
        change = LeaseEnded(
            lease_id=lease_id, reason=reason, partial_responses=tuple(partial_responses)
        )
        self.contents.end(change)
        self._log.append(change)
