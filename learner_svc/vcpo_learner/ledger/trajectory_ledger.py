"""The ledger: the state of every training trajectory, from its lease to its end.

```
            grant                 the whole group arrived           take_batch
   prompt --------->  in flight  -------------------------> buffered ----------> consumed
     ^                    |                                     |
     |                    | expired, failed, released           | beyond the lag bound
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
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from vcpo.algo import GroupFilter
from vcpo.records.reasons import DropReason
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.limits import MAX_PARTIAL_TOKENS
from vcpo.wire.trajectory import PartialResponse, Trajectory
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.accounting import TrajectoryCounts
from vcpo_learner.ledger.groups import (
    Group,
    GroupBuffer,
    group_from_lease,
    group_from_message,
    newest_trajectories,
)
from vcpo_learner.ledger.leases import LeaseBook, OpenLease, SubmitOutcome
from vcpo_learner.ledger.ledger_state import LedgerState
from vcpo_learner.ledger.requeue import RequeuedPrompt, restore_requeued, save_requeued
from vcpo_learner.prompts.source import PromptSource, SequentialPrompts

_OLD_RELEASED = "handed_back"
"""Name of `DropReason.RELEASED` in older checkpoints."""


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
    ) -> None:
        """Create an empty ledger.

        prompt_source: chooses new prompts; None counts upwards.
        """
        self._group_filter = group_filter
        self._source = SequentialPrompts() if prompt_source is None else prompt_source
        self._trajectories_per_prompt = trajectories_per_prompt
        self._max_attempts = max_attempts
        self._book = LeaseBook(
            prefix=f"train-{incarnation}", timeout_s=lease_timeout_s, clock=clock
        )
        self._requeued: deque[RequeuedPrompt] = deque()
        self._buffer = GroupBuffer(prompts_per_step=prompts_per_step)
        self._leased = 0
        self._consumed = 0
        self._dropped: Counter[str] = Counter()
        self._wasted_tokens: Counter[str] = Counter()

    def counts(self) -> TrajectoryCounts:
        """Count all trajectories; arrived trajectories of an open lease count as buffered."""
        open_leases = self._book.all()
        arrived = sum(len(lease.arrived) for lease in open_leases)
        return TrajectoryCounts(
            leased=self._leased,
            in_flight=sum(lease.num_missing for lease in open_leases),
            buffered=arrived + self._buffer.num_trajectories,
            consumed=self._consumed,
            dropped=dict(self._dropped),
        )

    def wasted_tokens(self) -> Mapping[str, int]:
        """Return the sampled tokens that arrived and were dropped since the start, by reason.

        A partial response is wasted when it is discarded, not when it is requeued. A trajectory
        that arrives after the end of its lease counts as `LEASE_EXPIRED`, each time it arrives.
        """
        return dict(self._wasted_tokens)

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
        responses with a token older than `oldest_partial_version`.
        """
        leases: list[OpenLease] = []
        num_partial_tokens = 0
        while len(leases) < num_groups and (requeued := self._next_prompt()) is not None:
            prompt = requeued.without_tokens_before(oldest_partial_version)
            discarded = requeued.num_sampled_tokens - prompt.num_sampled_tokens
            self._waste(discarded, DropReason.LAG_EXCEEDED)
            num_partial_tokens += prompt.num_partial_tokens
            if num_partial_tokens > MAX_PARTIAL_TOKENS and leases:
                self._requeued.appendleft(prompt)
                break
            leases.append(
                self._book.open(
                    worker_id=worker_id,
                    prompt_index=prompt.prompt_index,
                    num_trajectories=self._trajectories_per_prompt,
                    attempt=prompt.attempts + 1,
                    policy_version=policy_version,
                    partial_responses=prompt.partial_responses,
                )
            )
            self._leased += self._trajectories_per_prompt
        return leases

    def has_issued(self, lease_id: str) -> bool:
        """Return whether the id has the form of this ledger's leases, open or closed."""
        return self._book.has_issued(lease_id)

    def submit(self, lease_id: str, trajectories: Sequence[Trajectory]) -> list[SubmitOutcome]:
        """Accept trajectories; a repeated submission changes nothing.

        Raises:
            InvalidMessageError: if a trajectory does not belong to the lease.
        """
        outcomes, fulfilled = self._book.submit(lease_id, trajectories)
        if fulfilled is not None:
            self._receive(group_from_lease(fulfilled))
        for trajectory, outcome in zip(trajectories, outcomes, strict=True):
            if outcome is SubmitOutcome.LEASE_ENDED:
                self._waste(trajectory.num_sampled_tokens, DropReason.LEASE_EXPIRED)
        return outcomes

    def fail(self, lease_id: str) -> None:
        """End a lease whose generation failed; do nothing if it is not open."""
        self._end(lease_id, DropReason.GENERATION_FAILED)

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
            InvalidMessageError: if there are more partial responses than trajectories in a lease.
        """
        most, number = self._trajectories_per_prompt, len(partial_responses)
        if number > most:
            raise InvalidMessageError("begun", f"{number} responses", f"at most {most} responses")
        leases = self._book.held_by(worker_id, lease_ids)
        for lease in leases:
            reason = DropReason.SURPLUS if lease.preempted else DropReason.RELEASED
            self._end(lease.lease_id, reason, partial_responses)
        return len(leases)

    def held_by(self, worker_id: str) -> list[str]:
        """Return the open leases of a worker, oldest first."""
        return [lease.lease_id for lease in self._book.held_by(worker_id)]

    def holder_of(self, lease_id: str) -> str | None:
        """Return the worker of an open lease; None if it is not open."""
        return self._book.holder_of(lease_id)

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

        Drops late groups first, see `drop_late`.
        """
        self.drop_late(
            policy_version=policy_version,
            max_lag_steps=max_lag_steps,
            admission_lag_steps=admission_lag_steps,
        )
        batch = self._buffer.take_batch()
        if batch is not None:
            self._consumed += sum(len(group.trajectories) for group in batch)
        return batch

    def return_batch(self, batch: Sequence[Group]) -> None:
        """Buffer a batch again after a step that was not taken; it no longer counts as consumed."""
        self._consumed -= sum(len(group.trajectories) for group in batch)
        self._buffer.add(batch)

    def quarantine(self, lease_ids: Collection[str]) -> list[Group]:
        """Drop buffered groups on which no step can be taken, and return them.

        Their prompts are not requeued, because the prompt may be what breaks the update.
        """
        dropped = self._buffer.remove(lease_ids)
        for group in dropped:
            self._dropped[DropReason.QUARANTINED] += len(group.trajectories)
            self._waste(group.num_sampled_tokens, DropReason.QUARANTINED)
        return dropped

    def newest_trajectories(self, policy_version: int, *, num_tokens: int) -> list[Trajectory]:
        """Return arrived trajectories that hold `num_tokens` tokens of a version; all if too few.

        The trajectories stay in the ledger. One of every prompt comes before a second of any.
        """
        arrived = [
            *(tuple(lease.arrived.values()) for lease in self._book.all()),
            *(group.trajectories for group in reversed(self._buffer.groups())),
        ]
        return newest_trajectories(arrived, policy_version=policy_version, num_tokens=num_tokens)

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
        """Return what a checkpoint keeps: the buffer, the prompts to grant again, the counts."""
        counts = self.counts()
        open_leases = self._book.all()
        head = ledger_pb2.LedgerSnapshot(
            leased=counts.leased,
            # The checkpoint does not keep an incomplete group; its prompt is requeued.
            in_flight=sum(lease.num_trajectories for lease in open_leases),
            consumed=counts.consumed,
            dropped=dict(counts.dropped),
            next_grant_number=self._book.next_grant_number,
        )
        save_requeued([*map(_requeued_prompt, open_leases), *self._requeued], head)
        self._source.save(head)
        return LedgerState(head=head, groups=tuple(sorted(self._buffer.groups())))

    def restore(self, parts: Sequence[ledger_pb2.LedgerSnapshot]) -> None:
        """Continue from the parts of a snapshot; only before the first grant.

        Trajectories that were in flight count as dropped. Failed attempts count from 0 again,
        because the learner that stopped may have caused them.
        """
        snapshot = parts[0]
        self._source.restore(snapshot)
        most = self._trajectories_per_prompt
        # Checkpoints of older versions may hold partial responses of redundant trajectories.
        self._requeued = deque(
            replace(prompt, partial_responses=prompt.partial_responses[:most])
            for prompt in restore_requeued(snapshot)
        )
        self._buffer.add(group_from_message(group) for part in parts for group in part.buffered)
        self._book.resume_numbering(snapshot.next_grant_number)
        self._leased = snapshot.leased
        self._consumed = snapshot.consumed
        self._dropped = Counter(dict(snapshot.dropped))
        if released := self._dropped.pop(_OLD_RELEASED, 0):
            self._dropped[DropReason.RELEASED] += released
        if snapshot.in_flight:
            self._dropped[DropReason.LEARNER_RESTARTED] += snapshot.in_flight

    def _drop_beyond(self, lag_steps: int, policy_version: int, reason: DropReason) -> None:
        """Drop the groups that a lag limit leaves no time for, and requeue their prompts."""
        late = self._buffer.remove_late(policy_version=policy_version, max_lag_steps=lag_steps)
        for group in late:
            prompt = RequeuedPrompt(prompt_index=group.prompt_index, attempts=group.attempt - 1)
            self._drop(len(group.trajectories), prompt, reason)
            self._waste(group.num_sampled_tokens, reason)

    def _receive(self, group: Group) -> None:
        """Buffer a complete group; with dynamic sampling drop it if all rewards are equal."""
        self._source.observe(group.prompt_index, group.trajectories)
        rewards = {trajectory.reward for trajectory in group.trajectories}
        if self._group_filter is GroupFilter.DYNAMIC_SAMPLING and len(rewards) == 1:
            self._dropped[DropReason.NO_SIGNAL] += len(group.trajectories)
            self._waste(group.num_sampled_tokens, DropReason.NO_SIGNAL)
        else:
            self._buffer.add([group])

    def _end(
        self,
        lease_id: str,
        reason: DropReason,
        partial_responses: Sequence[PartialResponse] = (),
    ) -> None:
        """Close an open lease, count its trajectories as dropped and requeue its prompt."""
        lease = self._book.close(lease_id)
        if lease is None:
            return
        leased = _requeued_prompt(lease)
        if reason is DropReason.GENERATION_FAILED:
            prompt = RequeuedPrompt(prompt_index=lease.prompt_index, attempts=lease.attempt)
        else:
            prompt = _requeued_prompt(lease, partial_responses)
        discarded = max(0, leased.num_sampled_tokens - prompt.num_sampled_tokens)
        self._waste(lease.num_arrived_tokens + discarded, reason)
        self._drop(lease.num_trajectories, prompt, reason)

    def _next_prompt(self) -> RequeuedPrompt | None:
        """Return the next prompt to grant; None if the source has none."""
        if self._requeued:
            return self._requeued.popleft()
        in_flight = {lease.prompt_index for lease in self._book.all()}
        prompt_index = self._source.next_prompt(in_flight)
        return None if prompt_index is None else RequeuedPrompt(prompt_index=prompt_index)

    def _drop(self, num_trajectories: int, prompt: RequeuedPrompt, reason: DropReason) -> None:
        """Count trajectories as dropped; requeue the prompt unless it failed too often."""
        self._dropped[reason] += num_trajectories
        if prompt.attempts < self._max_attempts:
            self._requeued.append(prompt)

    def _waste(self, num_tokens: int, reason: DropReason) -> None:
        if num_tokens:
            self._wasted_tokens[reason] += num_tokens


def _requeued_prompt(
    lease: OpenLease, partial_responses: Sequence[PartialResponse] = ()
) -> RequeuedPrompt:
    """Return the prompt of a lease that ends without a failed attempt of its own."""
    return RequeuedPrompt(
        prompt_index=lease.prompt_index,
        attempts=lease.attempt - 1,
        partial_responses=tuple(partial_responses) or lease.partial_responses,
    )
