"""The contents of the ledger: where every trajectory is, and what each change does to it.

A change is applied, not decided, so the same changes give the same contents: in the process that
emitted them, and in the one that replays them over the ledger of a checkpoint.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from vcpo.algo.methods import GroupFilter
from vcpo.records.reasons import DropReason
from vcpo.wire.trajectory import Trajectory, trajectory_from_message
from vcpo.wire.v1 import ledger_pb2, work_pb2
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.changes import Change, InconsistentChangeError
from vcpo_learner.ledger.lag_limit import LagLimit, limit_from_message, limit_to_message
from vcpo_learner.ledger.lease import (
    Lease,
    SubmitOutcome,
    lease_from_message,
    lease_to_message,
    missing_numbers,
    partials_from_messages,
)
from vcpo_learner.ledger.lease_book import GroupBuffer, LeaseBook
from vcpo_learner.prompts.source import PromptSource

_PART_BYTES: Final = 256 << 20
"""Far below 2 GiB, the most that one protobuf message may have; a part may exceed it by a group."""
_LOST: Final = (DropReason.LAG_EXCEEDED, DropReason.THROTTLED, DropReason.WORKER_SET_ASIDE)
"""Reasons for which a group is dropped and its prompt requeued."""
_NOT_OF_RESPONSES: Final = (DropReason.SURPLUS, DropReason.WORKER_SET_ASIDE)
"""Reasons for which a lease ends whatever its responses are."""


class LedgerContents:
    """Where every trajectory of the run is. Others read it; only changes write it."""

    def __init__(
        self,
        *,
        prompts_per_step: int,
        trajectories_per_prompt: int,
        lease_timeout_s: float,
        max_attempts: int,
        incarnation: str,
        clock: Clock,
        group_filter: GroupFilter,
        prompt_source: PromptSource,
    ) -> None:
        self._group_size = trajectories_per_prompt
        self._batch_size = prompts_per_step * trajectories_per_prompt
        self._max_attempts = max_attempts
        self._group_filter = group_filter
        self._source = prompt_source
        self.leases = LeaseBook(
            prefix=f"train-{incarnation}", timeout_s=lease_timeout_s, clock=clock
        )
        """The open leases."""
        self.requeued: deque[Lease] = deque()
        """Prompts that are leased before new ones, in this order."""
        self.buffer = GroupBuffer(prompts_per_step=prompts_per_step)
        """Complete groups."""
        self.accuracies: Mapping[int, float] = {}
        """Accuracies of the evaluations so far, by the step at which each began."""
        self.lag_limit: LagLimit | None = None
        """The limit that host, warning or a rollback has set; None if none of them has."""
        self._leased = self._consumed = 0
        self._dropped: Counter[str] = Counter()
        self._wasted_tokens: Counter[str] = Counter()

    @property
    def version(self) -> int:
        """Steps whose batches are consumed: the version that the next batch is applied to."""
        return self._consumed // self._batch_size

    def counts(self) -> TrajectoryCounts:
        """Count all trajectories; accepted ones of an incomplete group count as buffered."""
        kept = sum(len(prompt.accepted) for prompt in self.requeued)
        return TrajectoryCounts(
            leased=self._leased,
            in_flight=self.leases.num_missing,
            buffered=self.leases.num_accepted + kept + self.buffer.num_trajectories,
            consumed=self._consumed,
            dropped=dict(self._dropped),
        )

    def wasted_tokens(self) -> Mapping[str, int]:
        """Return the sampled tokens that arrived and were dropped since the start, by reason.

        A partial response is wasted when it is discarded, not when it is requeued. A trajectory
        that arrives after the end of its lease counts as `LEASE_EXPIRED`, each time it arrives.
        """
        return dict(self._wasted_tokens)

    def waiting_trajectories(self) -> Iterator[Sequence[Trajectory]]:
        """Yield the accepted trajectories that wait, group by group: incomplete ones first."""
        for lease in (*self.leases.all(), *reversed(self.buffer.groups()), *self.requeued):
            yield lease.trajectories

    def replay(self, change: Change, returned: Iterable[Lease] = ()) -> Sequence[Lease]:
        """Apply a change of an earlier process.

        Raises:
            InconsistentChangeError: if it does not fit the ledger, which stays as it is.
        """
        try:
            if isinstance(change, ledger_pb2.LeaseGranted) and not change.is_requeued:
                # The choice is known; the source must have made it to choose alike later.
                self._source.next_prompt(self.leases.prompts())
            return self.apply(change, returned)
        except ValueError as error:
            raise InconsistentChangeError(str(error)) from error

    def apply(self, change: Change, returned: Iterable[Lease] = ()) -> Sequence[Lease]:
        """Apply a change; return the leases that it opens, ends, drops or consumes.

        returned: the groups of the steps that a `RolledBack` gives back.

        Raises:
            InconsistentChangeError: if it does not fit the ledger, which stays as it is.
            InvalidMessageError: if a response in it is invalid.
        """
        match change:
            case ledger_pb2.LeaseGranted():
                return [self._grant(change)]
            case work_pb2.SubmitRequest():
                self._accept(self._open_lease(change.lease_id), _trajectories(change))
            case ledger_pb2.LeaseEnded():
                return [self._end(change)]
            case ledger_pb2.GroupsDropped():
                return self._drop(change)
            case ledger_pb2.BatchConsumed():
                return self._consume(change)
            case ledger_pb2.Evaluated():
                self.accuracies = {**self.accuracies, change.step: change.accuracy}
            case ledger_pb2.LagLimit():
                self.lag_limit = limit_from_message(change)
            case ledger_pb2.LearnerRestarted():
                self._restart()
            case ledger_pb2.RolledBack():
                self._roll_back(change, returned)
        return ()

    def snapshot_at(self, log_position: int) -> LedgerState:
        """Return what a checkpoint keeps: all contents, and the newest change that is in them."""
        head = ledger_pb2.LedgerSnapshot(
            leased=self._leased,
            consumed=self._consumed,
            dropped=dict(self._dropped),
            next_grant_number=self.leases.next_grant_number,
            next_group_number=self.leases.next_group_number,
            requeued=[lease_to_message(prompt) for prompt in self.requeued],
            open_leases=[lease_to_message(lease) for lease in self.leases.all()],
            log_position=log_position,
            accuracies=self.accuracies,
            lag_limit=None if self.lag_limit is None else limit_to_message(self.lag_limit),
        )
        self._source.save(head)
        return LedgerState(head=head, groups=tuple(sorted(self.buffer.groups())))

    def restore(self, parts: Sequence[ledger_pb2.LedgerSnapshot]) -> None:
        """Continue from the parts of a snapshot; only before the first change.

        Raises:
            InvalidMessageError: naming the first invalid field.
        """
        head = parts[0]
        self._source.restore(head)
        self.requeued.extend(lease_from_message(each, path="requeued[]") for each in head.requeued)
        for part in parts:
            self.buffer.add(lease_from_message(each, path="buffered[]") for each in part.buffered)
        self.leases.restore(
            [lease_from_message(each, path="open_leases[]") for each in head.open_leases],
            next_grant_number=head.next_grant_number,
            next_group_number=head.next_group_number,
        )
        self._leased, self._consumed = head.leased, head.consumed
        self._dropped = Counter(dict(head.dropped))
        self.accuracies = dict(head.accuracies)
        if head.HasField("lag_limit"):
            self.lag_limit = limit_from_message(head.lag_limit)

    def _grant(self, change: ledger_pb2.LeaseGranted) -> Lease:
        """Lease the first requeued prompt, or a new one."""
        prompt = Lease(prompt_index=change.prompt_index)
        if change.is_requeued:
            if not self.requeued or self.requeued[0].prompt_index != change.prompt_index:
                raise InconsistentChangeError(f"prompt {change.prompt_index} is not requeued")
            requeued = self.requeued.popleft()
            prompt = requeued.without_tokens_before(change.oldest_version)
            self._discard(requeued, prompt, DropReason.LAG_EXCEEDED)
        lease = self.leases.open(
            prompt,
            lease_id=change.lease_id,
            worker_id=change.worker_id,
            response_numbers=missing_numbers(prompt.accepted, self._group_size),
            policy_version=change.policy_version,
        )
        self._leased += lease.num_trajectories
        return lease

    def _accept(self, lease: Lease, trajectories: Sequence[Trajectory]) -> list[SubmitOutcome]:
        """Accept trajectories of an open lease, and buffer its group if it is complete now.

        With dynamic sampling a group of equal rewards is dropped instead.

        Raises:
            InvalidMessageError: if a trajectory does not belong to the lease.
        """
        outcomes = self.leases.accept(lease, trajectories)
        if lease.num_missing:
            return outcomes
        lease.partial_responses = ()
        self._source.observe(lease.prompt_index, lease.trajectories)
        rewards = {each.reward for each in lease.accepted.values()}
        if self._group_filter is GroupFilter.DYNAMIC_SAMPLING and len(rewards) == 1:
            self._count_dropped(len(lease.accepted), DropReason.NO_SIGNAL)
            self._waste(lease.num_sampled_tokens, DropReason.NO_SIGNAL)
        else:
            self.buffer.add([lease])
        return outcomes

    def _end(self, change: ledger_pb2.LeaseEnded) -> Lease:
        """Close a lease, count its trajectories as dropped and requeue its prompt.

        Trajectories kept from before a restart stay with the prompt.
        """
        lease, reason = self._open_lease(change.lease_id), DropReason(change.reason)
        handed_over = partials_from_messages(change.partial_responses, path="partial_responses")
        self.leases.close(lease.lease_id)
        is_too_long = reason is DropReason.PROMPT_TOO_LONG
        failed = is_too_long or reason is DropReason.GENERATION_FAILED
        # The responses may be why the generation failed.
        partials = () if failed else handed_over or lease.partial_responses
        # Not if the worker had to give it up, is at fault, or hands over what it sampled.
        is_lost = reason not in _NOT_OF_RESPONSES and not handed_over
        prompt = lease.requeue(partial_responses=partials, failed=failed, is_lost=is_lost)
        if is_too_long:
            prompt.failures = self._max_attempts
        leased = sum(each.num_sampled_tokens for each in lease.partial_responses)
        requeued = sum(each.num_sampled_tokens for each in partials)
        arrived = sum(each.num_sampled_tokens for each in lease.arrived)
        self._waste(arrived + max(0, leased - requeued), reason)
        self._lose(lease.num_trajectories, prompt, reason)
        return lease

    def _drop(self, change: ledger_pb2.GroupsDropped) -> list[Lease]:
        """Drop buffered groups; requeue their prompts unless those may be at fault."""
        groups, reason = self.buffer.remove(change.lease_ids), DropReason(change.reason)
        for group in groups:
            self._waste(group.num_sampled_tokens, reason)
            if reason in _LOST:
                prompt = Lease(prompt_index=group.prompt_index, failures=group.failures)
                self._lose(len(group.accepted), prompt, reason)
            else:
                self._count_dropped(len(group.accepted), reason)
        return groups

    def _consume(self, change: ledger_pb2.BatchConsumed) -> list[Lease]:
        """Consume the groups of a step that an earlier process took."""
        groups = self.buffer.remove(change.lease_ids)
        if len(groups) != len(change.lease_ids):
            raise InconsistentChangeError(
                f"step {change.policy_version + 1}: {len(change.lease_ids)} groups were consumed,"
                f" and {len(groups)} of them are buffered"
            )
        self._consumed += sum(len(group.accepted) for group in groups)
        return groups

    def _restart(self) -> None:
        """End all leases and keep what they brought; failed attempts count from 0 again.

        What is missing counts as dropped. The learner that stopped may have caused the failures.
        """
        self._interrupt_leases(DropReason.LEARNER_RESTARTED)
        self.requeued = deque(replace(prompt, failures=0) for prompt in self.requeued)
        groups = self.buffer.remove([group.lease_id for group in self.buffer.groups()])
        self.buffer.add(replace(group, failures=0) for group in groups)

    def _roll_back(self, change: ledger_pb2.RolledBack, returned: Iterable[Lease]) -> None:
        """Go back to a version: what later versions consumed or sampled is dropped.

        Evaluations of later versions are forgotten: nobody has these parameters any more.
        """
        version, reason = change.policy_version, DropReason.ROLLED_BACK
        self._interrupt_leases(reason)
        self.accuracies = {at: kept for at, kept in self.accuracies.items() if at <= version}
        undone = self._consumed - version * self._batch_size
        self._consumed -= undone
        if change.returns_groups:
            self.buffer.add(returned)
        else:
            self._count_dropped(undone, reason)
        newer = [group for group in self.buffer.groups() if group.newest_policy_version > version]
        for group in self.buffer.remove([group.lease_id for group in newer]):
            self._waste(group.num_sampled_tokens, reason)
            self._lose(len(group.accepted), Lease(prompt_index=group.prompt_index), reason)
        prompts, self.requeued = self.requeued, deque()
        for prompt in prompts:
            self.requeued.append(prompt.without_tokens_after(version))
            self._discard(prompt, self.requeued[-1], reason)

    def _open_lease(self, lease_id: str) -> Lease:
        lease = self.leases.get(lease_id)
        if lease is None:
            raise InconsistentChangeError(f"{lease_id} is not open")
        return lease

    def _interrupt_leases(self, reason: DropReason) -> None:
        """End every lease; its prompt is requeued first, in its place, with what has arrived."""
        leases = self.leases.all()
        for lease in leases:
            self.leases.close(lease.lease_id)
            self._count_dropped(lease.num_missing, reason)
        self.requeued.extendleft(lease.requeue_unfinished() for lease in reversed(leases))

    def _lose(self, num_trajectories: int, prompt: Lease, reason: DropReason) -> None:
        """Count trajectories as dropped; requeue the prompt unless it failed too often."""
        self._count_dropped(num_trajectories, reason)
        if prompt.failures >= self._max_attempts:
            self._discard(prompt, None, reason)
        elif prompt.accepted:  # they count in admission already: their group does not wait
            self.requeued.appendleft(prompt)
        else:
            self.requeued.append(prompt)

    def _discard(self, before: Lease, after: Lease | None, reason: DropReason) -> None:
        """Count what a waiting prompt held before and does not hold any more."""
        num_left = len(after.accepted) if after else 0
        num_tokens_left = after.num_sampled_tokens if after else 0
        self._count_dropped(len(before.accepted) - num_left, reason)
        self._waste(before.num_sampled_tokens - num_tokens_left, reason)

    def _count_dropped(self, num_trajectories: int, reason: DropReason) -> None:
        if num_trajectories:
            self._dropped[reason] += num_trajectories

    def _waste(self, num_tokens: int, reason: DropReason) -> None:
        """Count tokens that were sampled and will not be trained on."""
        if num_tokens:
            self._wasted_tokens[reason] += num_tokens


def _trajectories(request: work_pb2.SubmitRequest) -> list[Trajectory]:
    return [
        trajectory_from_message(each, path=f"trajectories[{index}]")
        for index, each in enumerate(request.trajectories)
    ]


class AccountingError(AssertionError):
    """The counts of trajectories do not add up. This is a bug; the learner stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryCounts:
    """Where every trajectory that was ever leased is now."""

    leased: int
    in_flight: int
    buffered: int
    consumed: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Dropped trajectories by their reason, a `vcpo.records.reasons.DropReason`."""

    def check(self) -> None:
        """Check that every leased trajectory is counted exactly once.

        Raises:
            AccountingError: with all counts, if the sum differs.
        """
        total = self.in_flight + self.buffered + self.consumed + sum(self.dropped.values())
        if self.leased != total:
            raise AccountingError(f"leased must equal the sum of the rest ({total}): {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """The ledger at one moment.

    It does not change while the ledger goes on, so another thread may write it. To make it costs
    the event loop no copy of a token of a buffered group.
    """

    head: ledger_pb2.LedgerSnapshot
    """Everything but the buffered groups."""
    groups: tuple[Lease, ...]
    """Buffered, in the order of their grants."""

    def parts(self, part_bytes: int = _PART_BYTES) -> Iterator[ledger_pb2.LedgerSnapshot]:
        """Yield messages for as many files: the head, with the first groups, and then more groups.

        part_bytes: size at which a message is yielded.
        """
        part, size_bytes = ledger_pb2.LedgerSnapshot(), self.head.ByteSize()
        part.CopyFrom(self.head)
        for group in self.groups:
            if size_bytes >= part_bytes:
                yield part
                part, size_bytes = ledger_pb2.LedgerSnapshot(), 0
            message = lease_to_message(group)
            part.buffered.append(message)
            size_bytes += message.ByteSize()
        yield part
