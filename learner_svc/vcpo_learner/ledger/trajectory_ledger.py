"""The ledger: the state of every training trajectory, from its lease to its end.

```
            grant                 the whole group arrived           take_batch
   prompt --------->  in flight  -------------------------> buffered ----------> consumed
     ^                    |                                     |
     |                    | expired, failed, released           | beyond the lag limit
     |                    | worker set aside                    | worker set aside
     +--------------------+------------- dropped <--------------+
       requeued, until `max_attempts`
```

Invariants, checked by `counts().check()` at every step:

* leased = in flight + buffered + consumed + dropped, and each drop has a reason. A prompt that is
  granted again is leased again.
* A batch holds no token beyond the lag limit at the version that consumes it. Admission makes late
  groups rare (`vcpo.control.admission`); `drop_late` removes the remaining ones. A throttled limit
  holds in the same way from the moment it is set.
* A lease closes once, so a trajectory is accepted at most once.
* Whatever changes is a `Change`, applied to the contents and emitted to the log; the same changes
  replayed over the ledger of a checkpoint give the same ledger in another process.

The unit is the prompt group. A group is trained on as a whole or dropped as a whole, because a
baseline over part of a group depends on which part was lost.

If a lease is released or expires, its prompt is requeued with the partial responses, and the next
lease resumes them. If a generation fails, they are discarded, because they may be the cause.

With dynamic sampling (DAPO) a group of equal rewards is dropped when it arrives, and its prompt is
not requeued. Admission does not count such a group, so other prompts are granted in its place.

This module decides; what a decision changes is in `vcpo_learner.ledger.contents`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from vcpo.algo.methods import GroupFilter
from vcpo.records.reasons import DropReason
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.limits import MAX_PARTIAL_TOKENS
from vcpo.wire.trajectory import (
    PartialResponse,
    Trajectory,
    partial_to_message,
    trajectory_to_message,
)
from vcpo.wire.v1 import ledger_pb2, work_pb2
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.changes import Change, ChangeLog, LogRoom, NoLog
from vcpo_learner.ledger.contents import LedgerContents, LedgerState
from vcpo_learner.ledger.lag_limit import LagLimit, limit_to_message
from vcpo_learner.ledger.lease import Lease, SubmitOutcome, newest_trajectories
from vcpo_learner.prompts.source import PromptSource, SequentialPrompts


class TrajectoryLedger(LedgerContents):
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
        super().__init__(
            prompts_per_step=prompts_per_step,
            trajectories_per_prompt=trajectories_per_prompt,
            lease_timeout_s=lease_timeout_s,
            max_attempts=max_attempts,
            incarnation=incarnation,
            clock=clock,
            group_filter=group_filter,
            prompt_source=SequentialPrompts() if prompt_source is None else prompt_source,
        )
        self._incarnation = incarnation
        self._log: ChangeLog = NoLog() if log is None else log

    def newest_trajectories(self, policy_version: int, *, num_tokens: int) -> list[Trajectory]:
        """Return arrived trajectories that hold `num_tokens` tokens of a version; all if too few.

        The trajectories stay in the ledger. One of every prompt comes before a second of any.
        """
        groups = list(self.waiting_trajectories())
        return newest_trajectories(groups, policy_version=policy_version, num_tokens=num_tokens)

    async def wait_until_kept(self) -> None:
        """Wait until every change so far outlives this process.

        Raises: as `check`.
        """
        await self._log.wait_until_kept()

    def check(self) -> None:
        """Raise what ended the keeping of changes, if something did."""
        self._log.check()

    @property
    def is_stuck(self) -> bool:
        """Whether changes cannot be kept now: a `committed` may wait for long."""
        return self._log.room is LogRoom.UNWRITABLE

    def grant(
        self,
        worker_id: str,
        *,
        num_groups: int,
        policy_version: int,
        oldest_partial_version: int = 0,
    ) -> list[Lease]:
        """Lease `num_groups` prompts: requeued ones first, then new ones of the prompt source.

        Returns fewer leases if the source has no prompt to give (its whole pool is in flight), if
        the partial responses of all leases would exceed `MAX_PARTIAL_TOKENS`, or if there is no
        room to keep what they bring. Discards partial responses and kept trajectories with a token
        older than `oldest_partial_version`.
        """
        leases: list[Lease] = []
        num_groups = self._num_groups_with_room(num_groups)
        num_partial_tokens = 0
        while len(leases) < num_groups:
            if self.requeued:
                prompt = self.requeued[0].without_tokens_before(oldest_partial_version)
                num_partial_tokens += prompt.num_partial_tokens
                if num_partial_tokens > MAX_PARTIAL_TOKENS and leases:
                    break
                prompt_index = prompt.prompt_index
            elif (chosen := self._source.next_prompt(self.leases.prompts())) is not None:
                prompt_index = chosen
            else:
                break
            change = ledger_pb2.LeaseGranted(
                lease_id=self.leases.new_lease_id(),
                worker_id=worker_id,
                prompt_index=prompt_index,
                policy_version=policy_version,
                oldest_version=oldest_partial_version,
                is_requeued=bool(self.requeued),
            )
            leases += self._make(change)
        return leases

    def num_groups_within(self, num_trajectories: int) -> int:
        """Return how many prompts may be granted next if at most so many trajectories may be.

        A requeued prompt with kept trajectories asks for the missing ones only.
        """
        number, left = 0, num_trajectories
        for prompt in self.requeued:
            missing = self._group_size - len(prompt.accepted)
            if not prompt.accepted or missing > left:
                break
            number, left = number + 1, left - missing
        return number + max(0, left) // self._group_size

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
        lease = self.leases.get(lease_id)
        if lease is None:
            outcome = self.leases.outcome_when_closed(lease_id)
            if outcome is SubmitOutcome.LEASE_ENDED:
                num_tokens = sum(each.num_sampled_tokens for each in trajectories)
                self._waste(num_tokens, DropReason.LEASE_EXPIRED)
            return [outcome] * len(trajectories)
        outcomes = self._accept(lease, trajectories)
        if SubmitOutcome.ACCEPTED in outcomes:
            self._log.append(_submission(lease_id, trajectories) if request is None else request)
        return outcomes

    def fail(self, lease_id: str, *, is_too_long: bool = False) -> None:
        """End a lease whose generation failed; do nothing if it is not open.

        is_too_long: whether its prompt never fits; then it is given up at once.
        """
        if (lease := self.leases.get(lease_id)) is not None:
            reason = DropReason.PROMPT_TOO_LONG if is_too_long else DropReason.GENERATION_FAILED
            self._end_each([lease], reason)

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
        most, number = self._group_size, len(partial_responses)
        if number > most:
            raise InvalidMessageError("begun", f"{number} responses", f"at most {most} responses")
        leases = self.leases.held_by(worker_id, lease_ids)
        if partial_responses and leases:
            leases[0].check_partial_responses(partial_responses)
        for lease in leases:
            reason = DropReason.SURPLUS if lease.preempted else DropReason.RELEASED
            self._end_each([lease], reason, partial_responses)
        return len(leases)

    def set_aside(self, worker_id: str) -> None:
        """End the leases of a worker and drop its buffered groups; their prompts are requeued."""
        self._end_each(self.leases.held_by(worker_id), DropReason.WORKER_SET_ASIDE)
        groups = (one for one in self.buffer.groups() if worker_id in one.workers)
        self._drop_groups([one.lease_id for one in groups], DropReason.WORKER_SET_ASIDE)

    def expire(self) -> list[str]:
        """End the leases whose time is over; return the worker of each."""
        leases = self.leases.expired_leases()
        self._end_each(leases, DropReason.LEASE_EXPIRED)
        return [lease.worker_id for lease in leases]

    def preempt(self, num_trajectories: int) -> None:
        """Mark the newest open leases as preempted, up to `num_trajectories` missing trajectories.

        Preempts whole leases, and never more than asked for. A lease that was preempted before and
        is still open counts towards the number.
        """
        leases = sorted(
            self.leases.all(),
            key=lambda lease: (lease.preempted, lease.oldest_version_to_come, lease.grant_number),
            reverse=True,
        )
        for lease in leases:
            num_trajectories -= lease.num_missing
            if num_trajectories < 0:
                break
            lease.preempted = True

    def preempted_leases(self, worker_id: str) -> list[str]:
        """Return the open leases that a worker is to interrupt and release, oldest first."""
        return [lease.lease_id for lease in self.leases.held_by(worker_id) if lease.preempted]

    def drop_late(
        self, *, policy_version: int, max_policy_lag_steps: int, lag_limit_steps: int | None = None
    ) -> None:
        """Drop the groups that exceed the lag limit when their turn comes; requeue their prompts.

        A late group in the buffer counts against admission. If it stayed there until its turn,
        admission would grant no work in its place, and the learner would wait for data.

        policy_version: version that the next batch is applied to.
        lag_limit_steps: throttled limit, if it is below the run's own `max_policy_lag_steps`.
        """
        limits = {DropReason.LAG_EXCEEDED: max_policy_lag_steps}
        if lag_limit_steps is not None:
            limits[DropReason.THROTTLED] = lag_limit_steps
        for reason, lag_steps in limits.items():
            late = self.buffer.late(policy_version=policy_version, max_policy_lag_steps=lag_steps)
            self._drop_groups([group.lease_id for group in late], reason)

    def take_batch(
        self, *, policy_version: int, max_policy_lag_steps: int, lag_limit_steps: int | None = None
    ) -> list[Lease] | None:
        """Consume the groups of one step, oldest tokens first; return None if there are too few.

        Drops late groups first, see `drop_late`. `record_step` or `return_batch` must follow: no
        change says so before.
        """
        self.drop_late(
            policy_version=policy_version,
            max_policy_lag_steps=max_policy_lag_steps,
            lag_limit_steps=lag_limit_steps,
        )
        batch = self.buffer.take_batch()
        if batch is not None:
            self._consumed += sum(len(group.accepted) for group in batch)
        return batch

    def return_batch(self, batch: Sequence[Lease]) -> None:
        """Buffer a batch again after a step that was not taken; it no longer counts as consumed."""
        self._consumed -= sum(len(group.accepted) for group in batch)
        self.buffer.add(batch)

    def record_step(
        self, batch: Sequence[Lease], *, policy_version: int, fresh: Sequence[Trajectory]
    ) -> None:
        """Keep the step that was taken, or skipped, on a batch of `take_batch`.

        fresh: trajectories beside the batch that calibrated it.
        """
        self._log.append(
            ledger_pb2.BatchConsumed(
                policy_version=policy_version,
                lease_ids=[group.lease_id for group in batch],
                fresh_trajectory_ids=[each.trajectory_id for each in fresh],
            )
        )

    def quarantine(self, lease_ids: Collection[str]) -> Sequence[Lease]:
        """Drop buffered groups on which no step can be taken, and return them.

        Their prompts are not requeued, because the prompt may be what breaks the update.
        """
        buffered = [group.lease_id for group in self.buffer.groups()]
        excluded = [lease_id for lease_id in buffered if lease_id in lease_ids]
        return self._drop_groups(excluded, DropReason.QUARANTINED)

    def roll_back(self, policy_version: int, returned: Sequence[Lease] = ()) -> None:
        """Go back to a version: what later versions sampled is dropped, and so is what they used.

        returned: the groups of all later steps; if given, they are buffered again instead, but for
            those with tokens of later versions.
        """
        change = ledger_pb2.RolledBack(policy_version=policy_version, returns_groups=bool(returned))
        self._make(change, returned)

    def record_version(self, version: ledger_pb2.VersionPublished) -> None:
        """Keep a version that is about to be announced."""
        self._log.append(version)

    def record_evaluation(self, step: int, accuracy: float) -> None:
        """Keep the result of an evaluation that began after so many steps."""
        self._make(ledger_pb2.Evaluated(step=step, accuracy=accuracy))

    def record_lag_limit(self, limit: LagLimit) -> None:
        """Keep a new lag limit."""
        if limit != self.lag_limit:
            self._make(limit_to_message(limit))

    def restart(self) -> None:
        """Begin as a new process with the contents of one that stopped: its leases end.

        What they brought is kept, and what is missing counts as dropped. Failed attempts count from
        0 again: the learner that stopped may have caused them.
        """
        self._make(ledger_pb2.LearnerRestarted(incarnation=self._incarnation))
        self._wasted_tokens.clear()  # they are counted from the start of a process

    def snapshot(self) -> LedgerState:
        """Return what a checkpoint keeps: all contents, and where the log goes on from there."""
        return self.snapshot_at(self._log.position)

    def _make(self, change: Change, returned: Iterable[Lease] = ()) -> Sequence[Lease]:
        """Apply a change and emit it; as `apply`."""
        leases = self.apply(change, returned)
        self._log.append(change)
        return leases

    def _end_each(
        self,
        leases: Iterable[Lease],
        reason: DropReason,
        partial_responses: Sequence[PartialResponse] = (),
    ) -> None:
        messages = [partial_to_message(each) for each in partial_responses]
        for lease in leases:
            self._make(
                ledger_pb2.LeaseEnded(
                    lease_id=lease.lease_id, reason=reason, partial_responses=messages
                )
            )

    def _drop_groups(self, lease_ids: Sequence[str], reason: DropReason) -> Sequence[Lease]:
        if not lease_ids:
            return ()
        return self._make(ledger_pb2.GroupsDropped(lease_ids=lease_ids, reason=reason))

    def _num_groups_with_room(self, num_groups: int) -> int:
        """Return how many of some prompts may be granted, as far as there is room to keep them.

        A log that is full leaves what the next step needs: only a checkpoint after it makes room.
        """
        if self._log.room is LogRoom.FREE:
            return num_groups
        if self._log.room is LogRoom.UNWRITABLE:
            return 0
        counts = self.counts()
        accepted = counts.buffered + counts.consumed
        wanted = (self.version + 1) * self._batch_size - accepted - counts.in_flight
        return min(num_groups, self.num_groups_within(wanted))


def _submission(lease_id: str, trajectories: Sequence[Trajectory]) -> work_pb2.SubmitRequest:
    return work_pb2.SubmitRequest(
        lease_id=lease_id, trajectories=[trajectory_to_message(each) for each in trajectories]
    )
