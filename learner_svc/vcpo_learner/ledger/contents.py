"""The contents of the ledger: open leases, requeued prompts, buffered groups, and the counts.

Each method applies one kind of change (`vcpo_learner.ledger.changes`). It decides nothing, so the
same changes give the same contents, in the process that made them and in the one that redoes them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from vcpo.algo import GroupFilter
from vcpo.records.reasons import DropReason
from vcpo.wire.trajectory import PartialResponse, Trajectory
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.ledger.accounting import TrajectoryCounts
from vcpo_learner.ledger.changes import (
    BatchConsumed,
    Evaluated,
    GroupsDropped,
    InconsistentChangeError,
    LagLimitLeft,
    LeaseEnded,
    LeaseGranted,
    RolledBack,
    TrajectoriesAccepted,
)
from vcpo_learner.ledger.groups import (
    Group,
    GroupBuffer,
    group_from_lease,
    group_from_message,
    group_to_message,
)
from vcpo_learner.ledger.lag_limit import left_from_message, left_to_message
from vcpo_learner.ledger.leases import LeaseBook, OpenLease, SubmitOutcome, missing_numbers
from vcpo_learner.ledger.requeue import (
    RequeuedPrompt,
    requeued_from_message,
    requeued_to_message,
)
from vcpo_learner.prompts.source import PromptSource

_PART_BYTES: Final = 256 << 20
"""Far below 2 GiB, the most that one protobuf message may have; a part may exceed it by a group."""
_LOST = (DropReason.LAG_EXCEEDED, DropReason.THROTTLED, DropReason.WORKER_SET_ASIDE)
"""Reasons for which a group is dropped and its prompt requeued."""
_NOT_OF_RESPONSES = (DropReason.SURPLUS, DropReason.WORKER_SET_ASIDE)
"""Reasons for which a lease ends whatever its responses are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """The ledger at one moment.

    It does not change while the ledger goes on, so another thread may write it. To make it costs
    the event loop no copy of a token of a buffered group.
    """

    head: ledger_pb2.LedgerSnapshot
    """Everything but the buffered groups."""
    groups: tuple[Group, ...]
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
            message = group_to_message(group)
            part.buffered.append(message)
            size_bytes += message.ByteSize()
        yield part


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step as the redo log has it: what it was computed from."""

    policy_version: int
    """Of the parameters before the step."""
    groups: tuple[Group, ...]
    fresh: tuple[Trajectory, ...] = ()
    """Trajectories beside the batch that calibrated it."""


class LedgerContents:
    """Where every trajectory of the run is. Owner: the ledger."""

    def __init__(
        self,
        *,
        prompts_per_step: int,
        trajectories_per_prompt: int,
        max_attempts: int,
        group_filter: GroupFilter,
        source: PromptSource,
        book: LeaseBook,
    ) -> None:
        self.book = book
        self.source = source
        self.buffer = GroupBuffer(prompts_per_step=prompts_per_step)
        self.requeued: deque[RequeuedPrompt] = deque()
        self.wasted_tokens: Counter[str] = Counter()
        self.consumed = 0
        self.accuracies: dict[int, float] = {}
        """Of the evaluations so far, by the step at which each began."""
        self.lag_limit: LagLimitLeft | None = None
        """What the lag limit was left at; None if it was never changed."""
        self._group_filter = group_filter
        self._trajectories_per_prompt = trajectories_per_prompt
        self._batch_trajectories = prompts_per_step * trajectories_per_prompt
        self._max_attempts = max_attempts
        self._leased = 0
        self._dropped: Counter[str] = Counter()

    @property
    def step(self) -> int:
        """Steps whose batches are consumed, which is the version of the ledger."""
        return self.consumed // self._batch_trajectories

    def counts(self) -> TrajectoryCounts:
        """Count all trajectories; accepted ones of an incomplete group count as buffered."""
        kept = sum(len(prompt.kept) for prompt in self.requeued)
        return TrajectoryCounts(
            leased=self._leased,
            in_flight=self.book.num_missing,
            buffered=self.book.num_accepted + kept + self.buffer.num_trajectories,
            consumed=self.consumed,
            dropped=dict(self._dropped),
        )

    def accepted(self) -> Iterator[Sequence[Trajectory]]:
        """Yield the accepted trajectories that wait, group by group: incomplete ones first."""
        for lease in self.book.all():
            yield (*lease.kept, *lease.arrived.values())
        for group in reversed(self.buffer.groups()):
            yield group.trajectories
        for prompt in self.requeued:
            yield prompt.kept

    def grant(self, change: LeaseGranted) -> OpenLease:
        """Open a lease.

        Raises:
            InconsistentChangeError: if another prompt is the first requeued one.
        """
        prompt = RequeuedPrompt(prompt_index=change.prompt_index)
        if change.is_requeued:
            if not self.requeued or self.requeued[0].prompt_index != change.prompt_index:
                raise InconsistentChangeError(f"prompt {change.prompt_index} is not requeued")
            requeued = self.requeued.popleft()
            prompt = requeued.without_tokens_before(change.oldest_version)
            self._count_dropped(len(requeued.kept) - len(prompt.kept), DropReason.LAG_EXCEEDED)
            discarded = requeued.num_sampled_tokens - prompt.num_sampled_tokens
            self.waste(discarded, DropReason.LAG_EXCEEDED)
        lease = self.book.open(
            lease_id=change.lease_id,
            worker_id=change.worker_id,
            grant_number=change.grant_number,
            group_number=prompt.group_number,
            prompt_index=prompt.prompt_index,
            response_numbers=missing_numbers(prompt.kept, self._trajectories_per_prompt),
            attempt=prompt.attempts + 1,
            policy_version=change.policy_version,
            partial_responses=prompt.partial_responses,
            kept=prompt.kept,
            lost_leases=prompt.lost_leases,
        )
        self._leased += lease.num_trajectories
        return lease

    def accept(self, change: TrajectoriesAccepted) -> list[SubmitOutcome]:
        """Accept trajectories, and buffer their group if it is complete now.

        Raises:
            InvalidMessageError: if a trajectory does not belong to the lease.
        """
        outcomes, fulfilled = self.book.submit(change.lease_id, change.trajectories)
        if fulfilled is not None:
            self._receive(group_from_lease(fulfilled))
        return outcomes

    def end(self, change: LeaseEnded) -> None:
        """Close a lease, count its trajectories as dropped and requeue its prompt.

        Trajectories kept from before a restart stay with the prompt.

        Raises:
            InconsistentChangeError: if the lease is not open.
        """
        lease = self.book.close(change.lease_id)
        if lease is None:
            raise InconsistentChangeError(f"{change.lease_id} is not open")
        is_too_long = change.reason is DropReason.PROMPT_TOO_LONG
        failed = is_too_long or change.reason is DropReason.GENERATION_FAILED
        # The responses may be why the generation failed.
        partials = () if failed else change.partial_responses or lease.partial_responses
        # Not if the worker had to give it up, is at fault, or hands over what it sampled.
        is_lost = change.reason not in _NOT_OF_RESPONSES and not change.partial_responses
        prompt = RequeuedPrompt(
            prompt_index=lease.prompt_index,
            attempts=self._max_attempts if is_too_long else lease.attempt - (not failed),
            partial_responses=partials,
            kept=lease.kept,
            group_number=lease.group_number,
            lost_leases=lease.lost_leases_after(failed=failed) if is_lost else lease.lost_leases,
        )
        leased = sum(each.num_sampled_tokens for each in lease.partial_responses)
        requeued = sum(each.num_sampled_tokens for each in partials)
        self.waste(lease.num_arrived_tokens + max(0, leased - requeued), change.reason)
        self._drop(lease.num_trajectories, prompt, change.reason)

    def drop(self, change: GroupsDropped) -> list[Group]:
        """Drop buffered groups and return them; requeue their prompts unless they are at fault."""
        groups = self.buffer.remove(change.lease_ids)
        for group in groups:
            self.waste(group.num_sampled_tokens, change.reason)
            if change.reason in _LOST:
                prompt = RequeuedPrompt(prompt_index=group.prompt_index, attempts=group.attempt - 1)
                self._drop(len(group.trajectories), prompt, change.reason)
            else:
                self._dropped[change.reason] += len(group.trajectories)
        return groups

    def consume(self, change: BatchConsumed) -> tuple[Group, ...]:
        """Consume the groups of a recorded step, and return them.

        Raises:
            InconsistentChangeError: if one of them is not buffered.
        """
        groups = self.buffer.remove(change.lease_ids)
        if len(groups) != len(change.lease_ids):
            raise InconsistentChangeError(
                f"step {change.policy_version + 1}: {len(change.lease_ids)} groups were consumed,"
                f" and {len(groups)} of them are buffered"
            )
        self.consumed += sum(len(group.trajectories) for group in groups)
        return tuple(groups)

    def note(self, change: Evaluated | LagLimitLeft) -> None:
        """Keep what the next learner must know beside the trajectories."""
        if isinstance(change, Evaluated):
            self.accuracies[change.step] = change.accuracy
        else:
            self.lag_limit = change

    def restart(self) -> None:
        """End all leases and keep what they brought; failed attempts count from 0 again.

        What is missing counts as dropped. The learner that stopped may have caused the failures.
        """
        self._end_open_leases(DropReason.LEARNER_RESTARTED)
        self.requeued = deque(replace(prompt, attempts=0) for prompt in self.requeued)
        groups = self.buffer.groups()
        self.buffer.remove([group.lease_id for group in groups])
        self.buffer.add(replace(group, attempt=1) for group in groups)

    def roll_back(self, change: RolledBack, steps: Iterable[RecordedStep]) -> None:
        """Go back to a version: what later versions consumed or sampled is dropped.

        Evaluations of later versions are forgotten: nobody has these parameters any more.

        steps: the later steps as recorded; only needed if their groups are returned.
        """
        version, reason = change.policy_version, DropReason.ROLLED_BACK
        self._end_open_leases(reason)
        self.accuracies = {at: kept for at, kept in self.accuracies.items() if at <= version}
        undone = self.consumed - version * self._batch_trajectories
        self.consumed -= undone
        if change.returns_groups:
            self.buffer.add(group for step in steps for group in step.groups)
        else:
            self._count_dropped(undone, reason)
        newer = [group for group in self.buffer.groups() if group.newest_policy_version > version]
        for group in self.buffer.remove([group.lease_id for group in newer]):
            self.waste(group.num_sampled_tokens, reason)
            self._drop(
                len(group.trajectories), RequeuedPrompt(prompt_index=group.prompt_index), reason
            )
        rest = [prompt.without_tokens_after(version) for prompt in self.requeued]
        for prompt, kept in zip(self.requeued, rest, strict=True):
            self._count_dropped(len(prompt.kept) - len(kept.kept), reason)
            self.waste(prompt.num_sampled_tokens - kept.num_sampled_tokens, reason)
        self.requeued = deque(rest)

    def waste(self, num_tokens: int, reason: DropReason) -> None:
        """Count tokens that were sampled and will not be trained on."""
        if num_tokens:
            self.wasted_tokens[reason] += num_tokens

    def snapshot(self, log_position: int) -> LedgerState:
        """Return what a checkpoint keeps.

        log_position: of the newest change that was applied.
        """
        head = ledger_pb2.LedgerSnapshot(
            leased=self._leased,
            consumed=self.consumed,
            dropped=dict(self._dropped),
            next_grant_number=self.book.next_grant_number,
            next_group_number=self.book.next_group_number,
            requeued=[requeued_to_message(prompt) for prompt in self.requeued],
            open_leases=self.book.to_messages(),
            log_position=log_position,
            accuracies=self.accuracies,
            lag_limit=None if self.lag_limit is None else left_to_message(self.lag_limit),
        )
        self.source.save(head)
        return LedgerState(head=head, groups=tuple(sorted(self.buffer.groups())))

    def restore(self, parts: Sequence[ledger_pb2.LedgerSnapshot]) -> None:
        """Continue from the parts of a snapshot; only before the first change.

        Raises:
            InvalidMessageError: naming the first invalid field.
        """
        head = parts[0]
        self.source.restore(head)
        self.requeued = deque(requeued_from_message(message) for message in head.requeued)
        self.buffer.add(group_from_message(group) for part in parts for group in part.buffered)
        self.book.restore(
            head.open_leases,
            next_grant_number=head.next_grant_number,
            next_group_number=head.next_group_number,
        )
        self._leased = head.leased
        self.consumed = head.consumed
        self._dropped = Counter(dict(head.dropped))
        self.accuracies = dict(head.accuracies)
        if head.HasField("lag_limit"):
            self.lag_limit = left_from_message(head.lag_limit)

    def _receive(self, group: Group) -> None:
        """Buffer a complete group; with dynamic sampling drop it if all rewards are equal."""
        self.source.observe(group.prompt_index, group.trajectories)
        rewards = {trajectory.reward for trajectory in group.trajectories}
        if self._group_filter is GroupFilter.DYNAMIC_SAMPLING and len(rewards) == 1:
            self._dropped[DropReason.NO_SIGNAL] += len(group.trajectories)
            self.waste(group.num_sampled_tokens, DropReason.NO_SIGNAL)
        else:
            self.buffer.add([group])

    def _end_open_leases(self, reason: DropReason) -> None:
        """End every lease; its prompt is requeued first, in its place, with what has arrived."""
        ended = []
        for lease in self.book.all():
            self.book.close(lease.lease_id)
            self._dropped[reason] += lease.num_missing
            ended.append(
                RequeuedPrompt(
                    prompt_index=lease.prompt_index,
                    attempts=lease.attempt - 1,
                    partial_responses=_unfinished(lease),
                    kept=(*lease.kept, *lease.arrived.values()),
                    grant_number=lease.grant_number,
                    group_number=lease.group_number,
                    lost_leases=lease.lost_leases,
                )
            )
        self.requeued.extendleft(reversed(ended))

    def _count_dropped(self, num_trajectories: int, reason: DropReason) -> None:
        if num_trajectories:
            self._dropped[reason] += num_trajectories

    def _drop(self, num_trajectories: int, prompt: RequeuedPrompt, reason: DropReason) -> None:
        """Count trajectories as dropped; requeue the prompt unless it failed too often."""
        self._dropped[reason] += num_trajectories
        if prompt.attempts < self._max_attempts:
            if prompt.kept:  # they count in admission already: their group does not wait for others
                self.requeued.appendleft(prompt)
            else:
                self.requeued.append(prompt)
        else:
            self._count_dropped(len(prompt.kept), reason)
            self.waste(prompt.num_sampled_tokens, reason)


def _unfinished(lease: OpenLease) -> tuple[PartialResponse, ...]:
    """Return the partial responses of a lease whose trajectories have not arrived."""
    return tuple(
        partial
        for partial in lease.partial_responses
        if f"{lease.lease_id}/{partial.number}" not in lease.arrived
    )
