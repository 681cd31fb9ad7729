"""The ledger that one process keeps in its memory; `protocol` has its contract."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, zip_longest

from vcpo.algo import GroupFilter
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.limits import MAX_PARTIAL_TOKENS
from vcpo.wire.trajectory import PartialResponse, Trajectory
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.ledger.accounting import DropReason, TrajectoryCounts
from vcpo_learner.ledger.groups import (
    Group,
    group_from_lease,
    group_from_message,
    group_to_message,
    groups_in_time,
)
from vcpo_learner.ledger.leases import Clock, LeaseBook, OpenLease, SubmitOutcome
from vcpo_learner.ledger.requeue import (
    RequeuedPrompt,
    num_sampled_tokens,
    restore_requeued,
    save_requeued,
)
from vcpo_learner.prompts.source import PromptSource, SequentialPrompts


class TrajectoryLedger:
    """A ledger in the memory of one process. Owner: the learner's event loop."""

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
        """Keep nothing yet.

        prompt_source: chooses prompts; None counts them up.
        """
        self._group_filter = group_filter
        self._source = SequentialPrompts() if prompt_source is None else prompt_source
        self._prompts_per_step = prompts_per_step
        self._trajectories_per_prompt = trajectories_per_prompt
        self._max_attempts = max_attempts
        self._book = LeaseBook(
            prefix=f"train-{incarnation}", timeout_s=lease_timeout_s, clock=clock
        )
        self._owed: deque[RequeuedPrompt] = deque()
        self._buffer: list[Group] = []
        self._leased = 0
        self._consumed = 0
        self._dropped: Counter[str] = Counter()
        self._wasted_tokens: Counter[str] = Counter()

    def counts(self) -> TrajectoryCounts:
        """Where every trajectory is now; arrived members of an open lease count as buffered."""
        open_leases = self._book.all()
        arrived = sum(len(lease.arrived) for lease in open_leases)
        return TrajectoryCounts(
            leased=self._leased,
            in_flight=sum(lease.num_missing for lease in open_leases),
            buffered=arrived + sum(len(group.trajectories) for group in self._buffer),
            consumed=self._consumed,
            dropped=dict(self._dropped),
        )

    def wasted_tokens(self) -> Mapping[str, int]:
        """Sampled tokens it was given and has dropped since its start, by `DropReason`.

        Answers begun are wasted when they are forgotten; what is owed may still be trained on. What
        arrives after its lease ended counts under `LEASE_EXPIRED`, each time it arrives.
        """
        return dict(self._wasted_tokens)

    def in_flight_by_worker(self) -> Mapping[str, int]:
        """Trajectories promised and not yet arrived, by worker."""
        return self._book.in_flight_by_worker()

    def grant(
        self,
        worker_id: str,
        *,
        num_groups: int,
        policy_version: int,
        oldest_partial_version: int = 0,
    ) -> list[OpenLease]:
        """Lease `num_groups` prompts: requeued ones first, then those that the source chooses.

        Fewer when it has none to choose, as when its whole pool is in flight, and when the answers
        begun would be more than `MAX_PARTIAL_TOKENS`. Those with a token older than
        `oldest_partial_version` are forgotten.
        """
        leases: list[OpenLease] = []
        num_partial_tokens = 0
        while len(leases) < num_groups and (owed := self._next_prompt()) is not None:
            prompt = owed.without_tokens_before(oldest_partial_version)
            forgotten = num_sampled_tokens(owed.begun) - num_sampled_tokens(prompt.begun)
            self._waste(forgotten, DropReason.LAG_EXCEEDED)
            num_partial_tokens += prompt.num_partial_tokens
            if num_partial_tokens > MAX_PARTIAL_TOKENS and leases:
                self._owed.appendleft(prompt)
                break
            leases.append(
                self._book.open(
                    worker_id=worker_id,
                    prompt_index=prompt.prompt_index,
                    num_trajectories=self._trajectories_per_prompt,
                    attempt=prompt.attempts + 1,
                    policy_version=policy_version,
                    begun=prompt.begun,
                )
            )
            self._leased += self._trajectories_per_prompt
        return leases

    def has_issued(self, lease_id: str) -> bool:
        """Whether the id has the form of this ledger's leases, open or closed."""
        return self._book.has_issued(lease_id)

    def submit(self, lease_id: str, trajectories: Sequence[Trajectory]) -> list[SubmitOutcome]:
        """Accept trajectories; repeating a submission changes nothing.

        Raises:
            InvalidMessageError: when an id does not belong to the lease.
        """
        outcomes, fulfilled = self._book.submit(lease_id, trajectories)
        if fulfilled is not None:
            self._receive(group_from_lease(fulfilled))
        for trajectory, outcome in zip(trajectories, outcomes, strict=True):
            if outcome is SubmitOutcome.LEASE_ENDED:
                self._waste(trajectory.num_sampled_tokens, DropReason.LEASE_EXPIRED)
        return outcomes

    def fail(self, lease_id: str) -> None:
        """End a lease whose generation failed; nothing happens when it is not open."""
        self._end(lease_id, DropReason.GENERATION_FAILED)

    def release(
        self,
        worker_id: str,
        lease_ids: Sequence[str],
        begun: Sequence[PartialResponse] = (),
    ) -> int:
        """End open leases of one worker, all when none is named; returns how many it ended.

        begun: what was sampled, when one lease is named; none leaves what the lease began with.

        Raises:
            InvalidMessageError: when that is more answers than the lease wants.
        """
        if len(begun) > (most := self._trajectories_per_prompt):
            requirement = f"at most {most} answers"
            raise InvalidMessageError("begun", f"{len(begun)} answers", requirement)
        leases = self._book.held_by(worker_id, lease_ids)
        for lease in leases:
            reason = DropReason.SURPLUS if lease.preempted else DropReason.RELEASED
            self._end(lease.lease_id, reason, begun)
        return len(leases)

    def held_by(self, worker_id: str) -> list[str]:
        """Open leases of a worker, oldest first."""
        return [lease.lease_id for lease in self._book.held_by(worker_id)]

    def expire(self) -> list[str]:
        """End the leases past their time; returns the worker of each."""
        leases = self._book.expired_leases()
        for lease in leases:
            self._end(lease.lease_id, DropReason.LEASE_EXPIRED)
        return [lease.worker_id for lease in leases]

    def take_batch(
        self, *, policy_version: int, max_lag_steps: int, admission_lag_steps: int | None = None
    ) -> list[Group] | None:
        """Consume one step's groups, oldest tokens first, or None while there are too few.

        Groups older than allowed at `policy_version` are dropped first, see `drop_late`.
        """
        self.drop_late(
            policy_version=policy_version,
            max_lag_steps=max_lag_steps,
            admission_lag_steps=admission_lag_steps,
        )
        if len(self._buffer) < self._prompts_per_step:
            return None
        batch = self._buffer[: self._prompts_per_step]
        self._buffer = self._buffer[self._prompts_per_step :]
        self._consumed += sum(len(group.trajectories) for group in batch)
        return batch

    def return_batch(self, batch: Sequence[Group]) -> None:
        """Take back a batch on which no step was taken, as if it had not been consumed."""
        self._consumed -= sum(len(group.trajectories) for group in batch)
        self._buffer.extend(batch)

    def quarantine(self, lease_ids: Collection[str]) -> list[Group]:
        """Drop buffered groups on which no step can be taken, and return them.

        Their prompts are not granted again: what ended an update may come from the prompt.
        """
        dropped = [group for group in self._buffer if group.lease_id in lease_ids]
        self._buffer = [group for group in self._buffer if group.lease_id not in lease_ids]
        for group in dropped:
            self._dropped[DropReason.QUARANTINED] += len(group.trajectories)
            self._waste(group.num_sampled_tokens, DropReason.QUARANTINED)
        return dropped

    def newest_trajectories(self, policy_version: int, *, num_tokens: int) -> list[Trajectory]:
        """Arrived trajectories with tokens of a version: as few as have so many of them.

        One answer of every prompt is taken before a second of any. They stay where they are. Fewer
        when there are no more.
        """
        arrived = [
            *(tuple(lease.arrived.values()) for lease in self._book.all()),
            *(group.trajectories for group in reversed(self._buffer)),
        ]
        found: list[Trajectory] = []
        for trajectory in filter(None, chain.from_iterable(zip_longest(*arrived))):
            if num_tokens <= 0:
                break
            if (own := trajectory.num_tokens_of(policy_version)) > 0:
                found.append(trajectory)
                num_tokens -= own
        return found

    def drop_late(
        self, *, policy_version: int, max_lag_steps: int, admission_lag_steps: int | None = None
    ) -> None:
        """Drop the groups whose turn comes too late, when the next is at `policy_version`.

        Their prompts are granted again. Kept until their turn, they would take up places that
        admission has for what can be used, and a generator that waits for them starves the learner.

        admission_lag_steps: the limit in force, where it is below the run's own `max_lag_steps`.
        """
        self._drop_beyond(max_lag_steps, policy_version, DropReason.LAG_EXCEEDED)
        if admission_lag_steps is not None:
            self._drop_beyond(admission_lag_steps, policy_version, DropReason.THROTTLED)

    def preempt(self, num_trajectories: int) -> None:
        """Recall open leases with the newest tokens, until so many trajectories are recalled.

        Whole leases only, and never more. Those recalled before and not ended yet count.
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
        """Open leases that a worker is to cut and hand back, oldest first."""
        return [lease.lease_id for lease in self._book.held_by(worker_id) if lease.preempted]

    def snapshot(self) -> ledger_pb2.LedgerSnapshot:
        """What a checkpoint keeps: the buffer, the prompts owed, the counts."""
        counts = self.counts()
        snapshot = ledger_pb2.LedgerSnapshot(
            buffered=[group_to_message(group) for group in sorted(self._buffer)],
            leased=counts.leased,
            # What has arrived of an unfinished group is not kept: the group is granted again.
            in_flight=sum(lease.num_trajectories for lease in self._book.all()),
            consumed=counts.consumed,
            dropped=dict(counts.dropped),
            next_grant_number=self._book.next_grant_number,
        )
        save_requeued([*(_owed(lease) for lease in self._book.all()), *self._owed], snapshot)
        self._source.save(snapshot)
        return snapshot

    def restore(self, snapshot: ledger_pb2.LedgerSnapshot) -> None:
        """Go on from a snapshot; only before the first grant.

        What was in flight then is dropped and its prompts are requeued. Failed attempts are counted
        anew: what made them fail may have been the learner that is gone.
        """
        self._source.restore(snapshot)
        self._owed = deque(restore_requeued(snapshot))
        self._buffer = [group_from_message(group) for group in snapshot.buffered]
        self._book.resume_numbering(snapshot.next_grant_number)
        self._leased = snapshot.leased
        self._consumed = snapshot.consumed
        self._dropped = Counter(dict(snapshot.dropped))
        if snapshot.in_flight:
            self._dropped[DropReason.LEARNER_RESTARTED] += snapshot.in_flight

    def _drop_beyond(self, lag_steps: int, policy_version: int, reason: DropReason) -> None:
        in_time = groups_in_time(
            self._buffer,
            policy_version=policy_version,
            prompts_per_step=self._prompts_per_step,
            max_lag_steps=lag_steps,
        )
        kept = {group.grant_number for group in in_time}
        for group in sorted(one for one in self._buffer if one.grant_number not in kept):
            owed = RequeuedPrompt(prompt_index=group.prompt_index, attempts=group.attempt - 1)
            self._drop(len(group.trajectories), owed, reason)
            self._waste(group.num_sampled_tokens, reason)
        self._buffer = in_time

    def _receive(self, group: Group) -> None:
        """Buffer a complete group, or drop it: nothing can be learned from equal rewards."""
        self._source.observe(group.prompt_index, group.trajectories)
        rewards = {trajectory.reward for trajectory in group.trajectories}
        if self._group_filter is GroupFilter.DYNAMIC_SAMPLING and len(rewards) == 1:
            self._dropped[DropReason.NO_SIGNAL] += len(group.trajectories)
            self._waste(group.num_sampled_tokens, DropReason.NO_SIGNAL)
        else:
            self._buffer.append(group)

    def _end(
        self, lease_id: str, reason: DropReason, begun: Sequence[PartialResponse] = ()
    ) -> None:
        lease = self._book.close(lease_id)
        if lease is None:
            return
        if reason is DropReason.GENERATION_FAILED:
            owed = RequeuedPrompt(prompt_index=lease.prompt_index, attempts=lease.attempt)
        else:
            owed = _owed(lease, begun)
        lost_tokens = max(0, num_sampled_tokens(lease.begun) - num_sampled_tokens(owed.begun))
        self._waste(lease.num_arrived_tokens + lost_tokens, reason)
        self._drop(lease.num_trajectories, owed, reason)

    def _next_prompt(self) -> RequeuedPrompt | None:
        if self._owed:
            return self._owed.popleft()
        in_flight = {lease.prompt_index for lease in self._book.all()}
        prompt_index = self._source.next_prompt(in_flight)
        return None if prompt_index is None else RequeuedPrompt(prompt_index=prompt_index)

    def _drop(self, size: int, owed: RequeuedPrompt, reason: DropReason) -> None:
        self._dropped[reason] += size
        if owed.attempts < self._max_attempts:
            self._owed.append(owed)

    def _waste(self, num_tokens: int, reason: DropReason) -> None:
        if num_tokens:
            self._wasted_tokens[reason] += num_tokens


def _owed(lease: OpenLease, begun: Sequence[PartialResponse] = ()) -> RequeuedPrompt:
    """What is owed when a lease ends that did not fail itself: no attempt of it is counted."""
    return RequeuedPrompt(
        prompt_index=lease.prompt_index,
        attempts=lease.attempt - 1,
        begun=tuple(begun) or lease.begun,
    )
