"""The ledger: the state of every training trajectory, from its lease to its end.

```
            grant                 the whole group arrived           take_batch
   prompt --------->  in flight  -------------------------> buffered ----------> consumed
     ^                    |                                     |
     |                    | expired, failed, released           | beyond the lag limit
     |                    | worker set aside                    | worker set aside
     +--------------------+------------- dropped <--------------+
       requeued, until `MAX_ATTEMPTS`
```

* leased = in flight + buffered + consumed + dropped, and each drop has a reason.
* A batch holds no token beyond the lag limit at the step that consumes it.
* A lease closes once, so a trajectory is accepted at most once.
* Whatever changes is a `Change`, applied here and emitted to the log. The log has no consumption:
  it becomes final with the checkpoint that contains it.

The unit is the prompt group: a baseline over part of a group depends on which part was lost.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from vcpo.algo.methods import GroupFilter
from vcpo.records.reasons import DropReason
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.limits import MAX_PARTIAL_TOKENS
from vcpo.wire.trajectory import (
    PartialResponse,
    Trajectory,
    partial_to_message,
    trajectory_from_message,
    trajectory_to_message,
)
from vcpo.wire.v1 import ledger_pb2, work_pb2
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.lag_limit import LagLimit, limit_from_message, limit_to_message
from vcpo_learner.ledger.lease import (
    MAX_ATTEMPTS,
    Lease,
    SubmitOutcome,
    lease_from_message,
    lease_to_message,
    missing_numbers,
    newest_trajectories,
    partials_from_messages,
)
from vcpo_learner.ledger.lease_book import GroupBuffer, LeaseBook
from vcpo_learner.ledger.redo_log import Change, InconsistentChangeError, RedoLog
from vcpo_learner.prompts.source import PromptSource, SequentialPrompts

_PART_BYTES: Final = 256 << 20
"""Far below 2 GiB, the most that one protobuf message may have; a part may exceed it by a group."""
_REQUEUED: Final = (
    DropReason.LAG_EXCEEDED,
    DropReason.THROTTLED,
    DropReason.WORKER_SET_ASIDE,
    DropReason.ROLLED_BACK,
)
"""Reasons for which a group is dropped and its prompt requeued."""
_NOT_OF_RESPONSES: Final = (DropReason.SURPLUS, DropReason.WORKER_SET_ASIDE)
"""Reasons for which a lease ends whatever its responses are."""


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


class TrajectoryLedger:
    """The training trajectories of one run, in memory. Owner: the learner's event loop."""

    def __init__(
        self,
        *,
        prompts_per_step: int,
        trajectories_per_prompt: int,
        lease_timeout_s: float,
        incarnation: str,
        clock: Clock,
        log: RedoLog,
        group_filter: GroupFilter = GroupFilter.NONE,
        prompt_source: PromptSource | None = None,
    ) -> None:
        """Create an empty ledger.

        prompt_source: chooses new prompts; None counts upwards.
        log: keeps the changes for the next process.
        """
        self.leases = LeaseBook(
            prefix=f"train-{incarnation}", timeout_s=lease_timeout_s, clock=clock
        )
        self.requeued: deque[Lease] = deque()
        """Prompts that are leased before new ones, in this order."""
        self.buffer = GroupBuffer(prompts_per_step=prompts_per_step)
        """Complete groups."""
        self.accuracies: Mapping[int, float] = {}
        """Accuracies of the evaluations so far, by the step at which each began."""
        self.lag_limit: LagLimit | None = None
        """The limit that host, warning or a rollback has set; None if none of them has."""
        self.restarts = 0
        """Starts of the run so far, but for the first."""
        self._incarnation = incarnation
        self._group_size = trajectories_per_prompt
        self._batch_size = prompts_per_step * trajectories_per_prompt
        self._group_filter = group_filter
        self._source: PromptSource = prompt_source or SequentialPrompts()
        self.log = log
        self._leased = self._consumed = 0
        self._dropped: Counter[str] = Counter()
        self._checked_for_late: object = None
        """What `drop_late` looked at last."""

    @property
    def step(self) -> int:
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

    def newest_trajectories(self, policy_version: int, *, num_tokens: int) -> list[Trajectory]:
        """Return arrived trajectories that hold `num_tokens` tokens of a version; all if too few.

        The trajectories stay in the ledger. One of every prompt comes before a second of any.
        """
        waiting = (*self.leases.all(), *reversed(self.buffer.groups()), *self.requeued)
        return newest_trajectories(
            [each.trajectories for each in waiting],
            policy_version=policy_version,
            num_tokens=num_tokens,
        )

    def grant(
        self, worker_id: str, *, num_groups: int, policy_version: int, oldest_step: int = 0
    ) -> list[Lease]:
        """Lease `num_groups` prompts: requeued ones first, then new ones of the prompt source.

        Returns fewer leases if the source has no prompt to give (its whole pool is in flight), if
        the partial responses of all leases would exceed `MAX_PARTIAL_TOKENS`, or if what they bring
        cannot be kept. Discards partial responses and kept trajectories with a token of a step
        before `oldest_step`.
        """
        leases: list[Lease] = []
        num_partial_tokens = 0
        while len(leases) < num_groups and not self.log.is_unwritable:
            if self.requeued:
                prompt = self.requeued[0].without_tokens_before(oldest_step)
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
                oldest_step=oldest_step,
                is_requeued=bool(self.requeued),
            )
            self._make(change)
            leases.append(self._open_lease(change.lease_id))
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
        """
        if (lease := self.leases.get(lease_id)) is None:
            return [self.leases.outcome_when_closed(lease_id)] * len(trajectories)
        outcomes = self._accept(lease, trajectories)
        if SubmitOutcome.ACCEPTED in outcomes:
            self.log.append(_submission(lease_id, trajectories) if request is None else request)
        return outcomes

    def fail(self, lease_id: str, *, is_too_long: bool = False) -> None:
        """End a lease whose generation failed; do nothing if it is not open.

        is_too_long: whether its prompt never fits; then it is given up at once.
        """
        if self.leases.get(lease_id) is not None:
            reason = DropReason.PROMPT_TOO_LONG if is_too_long else DropReason.GENERATION_FAILED
            self._make(ledger_pb2.LeaseEnded(lease_id=lease_id, reason=reason))

    def release(
        self,
        worker_id: str,
        lease_ids: Sequence[str],
        partial_responses: Sequence[PartialResponse] = (),
    ) -> int:
        """End open leases of one worker, or all of them if `lease_ids` is empty; return how many.

        partial_responses: what the worker sampled; only with exactly one lease. If empty, the
            prompt keeps the partial responses that it was leased with.
        """
        most, number = self._group_size, len(partial_responses)
        if number > most:
            raise InvalidMessageError("begun", f"{number} responses", f"at most {most} responses")
        leases = self.leases.held_by(worker_id, lease_ids)
        if partial_responses and leases:
            leases[0].check_partial_responses(partial_responses)
        for lease in leases:
            change = ledger_pb2.LeaseEnded(
                lease_id=lease.lease_id,
                reason=DropReason.SURPLUS if lease.preempted else DropReason.RELEASED,
                partial_responses=[partial_to_message(each) for each in partial_responses],
            )
            self._make(change)
        return len(leases)

    def set_aside(self, worker_id: str) -> None:
        """End the leases of a worker and drop its buffered groups; their prompts are requeued."""
        reason = DropReason.WORKER_SET_ASIDE
        for lease in self.leases.held_by(worker_id):
            self._make(ledger_pb2.LeaseEnded(lease_id=lease.lease_id, reason=reason))
        self.drop((one for one in self.buffer.groups() if worker_id in one.workers), reason)

    def expire(self) -> list[str]:
        leases = self.leases.expired_leases()
        for lease in leases:
            reason = DropReason.LEASE_EXPIRED
            self._make(ledger_pb2.LeaseEnded(lease_id=lease.lease_id, reason=reason))
        return [lease.worker_id for lease in leases]

    def preempt(self, num_trajectories: int) -> None:
        """Mark the newest open leases as preempted, up to `num_trajectories` missing trajectories.

        Preempts whole leases, and never more than asked for. A lease that was preempted before and
        is still open counts towards the number.
        """
        leases = sorted(
            self.leases.all(),
            key=lambda lease: (lease.preempted, lease.oldest_step_to_come, lease.grant_number),
            reverse=True,
        )
        for lease in leases:
            num_trajectories -= lease.num_missing
            if num_trajectories < 0:
                break
            lease.preempted = True

    def preempted_leases(self, worker_id: str) -> list[str]:
        return [lease.lease_id for lease in self.leases.held_by(worker_id) if lease.preempted]

    def drop(self, groups: Iterable[Lease], reason: DropReason) -> None:
        if lease_ids := [group.lease_id for group in groups]:
            self._make(ledger_pb2.GroupsDropped(lease_ids=lease_ids, reason=reason))

    def drop_late(
        self, *, step: int, max_policy_lag_steps: int, lag_limit_steps: int | None = None
    ) -> None:
        """Drop the groups that exceed the lag limit when their turn comes; requeue their prompts.

        A late group in the buffer counts against admission. If it stayed there until its turn,
        admission would grant no work in its place, and the learner would wait for data.

        step: steps before the next batch.
        lag_limit_steps: throttled limit, if it is below the run's own `max_policy_lag_steps`.
        """
        looked_at = step, max_policy_lag_steps, lag_limit_steps, self.buffer.num_changes
        if looked_at == self._checked_for_late:
            return
        limits = {DropReason.LAG_EXCEEDED: max_policy_lag_steps}
        if lag_limit_steps is not None:
            limits[DropReason.THROTTLED] = lag_limit_steps
        for reason, lag_steps in limits.items():
            self.drop(self.buffer.late(step=step, max_policy_lag_steps=lag_steps), reason)
        self._checked_for_late = *looked_at[:3], self.buffer.num_changes

    def take_batch(
        self, *, step: int, max_policy_lag_steps: int, lag_limit_steps: int | None = None
    ) -> list[Lease] | None:
        """Consume the groups of one step, oldest tokens first; return None if there are too few.

        Drops late groups first, see `drop_late`.
        """
        self.drop_late(
            step=step, max_policy_lag_steps=max_policy_lag_steps, lag_limit_steps=lag_limit_steps
        )
        batch = self.buffer.take_batch()
        if batch is not None:
            self._consumed += sum(len(group.accepted) for group in batch)
        return batch

    def return_batch(self, batch: Sequence[Lease]) -> None:
        self._consumed -= sum(len(group.accepted) for group in batch)
        self.buffer.add(batch)

    def record_evaluation(self, step: int, accuracy: float) -> None:
        self._make(ledger_pb2.Evaluated(step=step, accuracy=accuracy))

    def record_lag_limit(self, limit: LagLimit) -> None:
        if limit != self.lag_limit:
            self._make(limit_to_message(limit))

    def restart(self, lost_changes: int = 0) -> None:
        """Begin as a new process with the ledger of one that stopped: its leases end.

        What they brought is kept, and what is missing counts as dropped. Failed attempts count from
        0 again: the learner that stopped may have caused them.

        lost_changes: changes that the log has lost; each may have been a start.
        """
        restarts = self.restarts + 1 + lost_changes
        self._make(ledger_pb2.LearnerRestarted(incarnation=self._incarnation, restarts=restarts))

    def snapshot(self) -> LedgerState:
        """Return what a checkpoint keeps, and the newest change in it: the log begins a file."""
        head = ledger_pb2.LedgerSnapshot(
            leased=self._leased,
            consumed=self._consumed,
            dropped=dict(self._dropped),
            next_grant_number=self.leases.next_grant_number,
            next_group_number=self.leases.next_group_number,
            requeued=[lease_to_message(prompt) for prompt in self.requeued],
            open_leases=[lease_to_message(lease) for lease in self.leases.all()],
            log_position=self.log.cut(self.step),
            accuracies=self.accuracies,
            lag_limit=None if self.lag_limit is None else limit_to_message(self.lag_limit),
            restarts=self.restarts,
        )
        self._source.save(head)
        return LedgerState(head=head, groups=tuple(sorted(self.buffer.groups())))

    def restore(self, parts: Sequence[ledger_pb2.LedgerSnapshot]) -> None:
        """Continue from the parts of a snapshot; only before the first change."""
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
        self.accuracies, self.restarts = dict(head.accuracies), head.restarts
        if head.HasField("lag_limit"):
            self.lag_limit = limit_from_message(head.lag_limit)

    def replay(self, change: Change) -> None:
        """Apply a change of an earlier process.

        Raises:
            InconsistentChangeError: if it does not fit the ledger, which stays as it is.
        """
        try:
            if isinstance(change, ledger_pb2.LeaseGranted) and not change.is_requeued:
                # The choice is known; the source must have made it to choose alike later.
                self._source.next_prompt(self.leases.prompts())
            self._apply(change)
        except ValueError as error:
            raise InconsistentChangeError(str(error)) from error

    def _make(self, change: Change) -> None:
        self._apply(change)
        self.log.append(change)

    def _apply(self, change: Change) -> None:
        match change:
            case ledger_pb2.LeaseGranted():
                self._grant(change)
            case work_pb2.SubmitRequest():
                self._accept(self._open_lease(change.lease_id), _trajectories(change))
            case ledger_pb2.LeaseEnded():
                self._end(change)
            case ledger_pb2.GroupsDropped():
                self._drop(change)
            case ledger_pb2.Evaluated():
                self.accuracies = {**self.accuracies, change.step: change.accuracy}
            case ledger_pb2.LagLimit():
                self.lag_limit = limit_from_message(change)
            case ledger_pb2.LearnerRestarted():
                self._restart(change)

    def _grant(self, change: ledger_pb2.LeaseGranted) -> None:
        """Lease the first requeued prompt, or a new one."""
        prompt = Lease(prompt_index=change.prompt_index)
        if change.is_requeued:
            if not self.requeued or self.requeued[0].prompt_index != change.prompt_index:
                raise InconsistentChangeError(f"prompt {change.prompt_index} is not requeued")
            requeued = self.requeued.popleft()
            prompt = requeued.without_tokens_before(change.oldest_step)
            self._count_dropped(requeued, prompt, DropReason.LAG_EXCEEDED)
        lease = self.leases.open(
            prompt,
            lease_id=change.lease_id,
            worker_id=change.worker_id,
            response_numbers=missing_numbers(prompt.accepted, self._group_size),
            policy_version=change.policy_version,
        )
        self._leased += lease.num_trajectories

    def _accept(self, lease: Lease, trajectories: Sequence[Trajectory]) -> list[SubmitOutcome]:
        """Accept trajectories of an open lease, and buffer its group if it is complete now.

        With dynamic sampling (DAPO) a group of equal rewards is dropped instead. Its prompt is not
        requeued, and admission does not count it, so another prompt is granted in its place.
        """
        outcomes = self.leases.accept(lease, trajectories)
        if lease.num_missing:
            return outcomes
        lease.partial_responses = ()
        self._source.observe(lease.prompt_index, lease.trajectories)
        rewards = {each.reward for each in lease.accepted.values()}
        if self._group_filter is GroupFilter.DYNAMIC_SAMPLING and len(rewards) == 1:
            self._count_dropped(lease, None, DropReason.NO_SIGNAL)
        else:
            self.buffer.add([lease])
        return outcomes

    def _end(self, change: ledger_pb2.LeaseEnded) -> None:
        """Close a lease, count its trajectories as dropped and requeue its prompt.

        The next lease resumes its partial responses, unless they may be why a generation failed.
        Trajectories kept from before a restart stay with the prompt.
        """
        lease, reason = self._open_lease(change.lease_id), DropReason(change.reason)
        handed_over = partials_from_messages(change.partial_responses, path="partial_responses")
        self.leases.close(lease.lease_id)
        is_too_long = reason is DropReason.PROMPT_TOO_LONG
        failed = is_too_long or reason is DropReason.GENERATION_FAILED
        prompt = lease.requeue(
            partial_responses=() if failed else handed_over or lease.partial_responses,
            failed=failed,
            # Not if the worker had to give it up, is at fault, or hands over what it sampled.
            is_lost=reason not in _NOT_OF_RESPONSES and not handed_over,
        )
        if is_too_long:
            prompt.failures = MAX_ATTEMPTS
        self._requeue(lease, prompt, reason)

    def _drop(self, change: ledger_pb2.GroupsDropped) -> None:
        reason = DropReason(change.reason)
        for group in self.buffer.remove(change.lease_ids):
            if reason in _REQUEUED:
                again = Lease(prompt_index=group.prompt_index, failures=group.failures)
                self._requeue(group, again, reason)
            else:
                self._count_dropped(group, None, reason)

    def _restart(self, change: ledger_pb2.LearnerRestarted) -> None:
        """End every lease; its prompt is requeued first, in its place, with what has arrived.

        Evaluations of later steps are forgotten: nobody has these parameters any more.
        """
        self.restarts = change.restarts
        leases = self.leases.all()
        waiting = [lease.requeue_unfinished() for lease in leases]
        for lease, prompt in zip(leases, waiting, strict=True):
            self.leases.close(lease.lease_id)
            self._count_dropped(lease, prompt, DropReason.LEARNER_RESTARTED)
        self.requeued = deque(replace(prompt, failures=0) for prompt in (*waiting, *self.requeued))
        groups = self.buffer.remove([group.lease_id for group in self.buffer.groups()])
        self.buffer.add(replace(group, failures=0) for group in groups)
        self.accuracies = {at: one for at, one in self.accuracies.items() if at <= self.step}

    def _open_lease(self, lease_id: str) -> Lease:
        if (lease := self.leases.get(lease_id)) is None:
            raise InconsistentChangeError(f"{lease_id} is not open")
        return lease

    def _requeue(self, before: Lease, prompt: Lease, reason: DropReason) -> None:
        """Count what a prompt loses, and requeue it unless it failed too often."""
        is_given_up = prompt.failures >= MAX_ATTEMPTS
        self._count_dropped(before, None if is_given_up else prompt, reason)
        if is_given_up:
            return
        if prompt.accepted:  # they count in admission already: their group does not wait
            self.requeued.appendleft(prompt)
        else:
            self.requeued.append(prompt)

    def _count_dropped(self, before: Lease, after: Lease | None, reason: DropReason) -> None:
        number = before.num_missing + len(before.accepted)
        if after is not None:
            number -= len(after.accepted)
        if number:
            self._dropped[reason] += number


def _trajectories(request: work_pb2.SubmitRequest) -> list[Trajectory]:
    return [
        trajectory_from_message(each, path=f"trajectories[{index}]")
        for index, each in enumerate(request.trajectories)
    ]


def _submission(lease_id: str, trajectories: Sequence[Trajectory]) -> work_pb2.SubmitRequest:
    return work_pb2.SubmitRequest(
        lease_id=lease_id, trajectories=[trajectory_to_message(each) for each in trajectories]
    )
