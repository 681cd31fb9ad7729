"""The leases that are open, and the complete groups that wait for their step, each in its order."""

from bisect import insort
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count, takewhile
from math import inf

from vcpo.wire.trajectory import Trajectory
from vcpo_learner.clock import Clock
from vcpo_learner.ledger.lease import NEXT, Lease, SubmitOutcome

_REMEMBERED_LEASES = 65_536


class LeaseBook:
    """The open leases of one purpose. Owner: the learner's event loop.

    A lease is closed exactly once and never opens again, so nothing is accepted twice. Lease ids
    contain the learner's incarnation and count its leases, so no id is given twice.

    Every call of a worker asks for the sums and for the worker's own leases, so both are kept up to
    date: a thousand workers hold some thousand leases.
    """

    def __init__(self, *, prefix: str, timeout_s: float, clock: Clock) -> None:
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._clock = clock
        self._open: dict[str, Lease] = {}
        """Oldest first. All have the same time, so they expire in this order."""
        self._held: defaultdict[str, dict[str, Lease]] = defaultdict(dict)
        """The open leases of each worker that has some."""
        self.num_missing = 0
        """Trajectories of the open leases that have not arrived."""
        self.num_accepted = 0
        """Trajectories of the groups of the open leases that have been accepted."""
        self._fulfilled: OrderedDict[str, None] = OrderedDict()
        self.next_grant_number = 0
        """One more than the largest number of a grant so far, those before a restart included."""
        self.next_group_number = 0
        """Groups that were begun so far, those before a restart included. Not the number of grants:
        a group that loses its lease has several."""
        self._ids = count()  # not the number of a grant: a later lease may take an earlier place

    def __len__(self) -> int:
        return len(self._open)

    def new_lease_id(self) -> str:
        return f"{self._prefix}-{next(self._ids)}"

    def open(
        self,
        prompt: Lease,
        *,
        worker_id: str,
        response_numbers: tuple[int, ...],
        policy_version: int,
        lease_id: str | None = None,
    ) -> Lease:
        """Lease a prompt that waits, or a new one, to a worker.

        lease_id: None makes one.
        """
        grant_number, group_number = prompt.grant_number, prompt.group_number
        if grant_number == NEXT:
            grant_number = self.next_grant_number
        if group_number == NEXT:
            group_number = self.next_group_number
            self.next_group_number += 1
        lease = replace(
            prompt,
            lease_id=self.new_lease_id() if lease_id is None else lease_id,
            worker_id=worker_id,
            grant_number=grant_number,
            group_number=group_number,
            response_numbers=response_numbers,
            policy_version=policy_version,
            accepted=dict(prompt.accepted),
        )
        self.next_grant_number = max(self.next_grant_number, grant_number + 1)
        self._add(lease)
        return lease

    def accept(self, lease: Lease, trajectories: Sequence[Trajectory]) -> list[SubmitOutcome]:
        outcomes = lease.accept(trajectories)
        num_accepted = outcomes.count(SubmitOutcome.ACCEPTED)
        self.num_missing -= num_accepted
        self.num_accepted += num_accepted
        if not lease.num_missing:
            self.close(lease.lease_id)
            self._fulfilled[lease.lease_id] = None
            if len(self._fulfilled) > _REMEMBERED_LEASES:
                self._fulfilled.popitem(last=False)
        return outcomes

    def outcome_when_closed(self, lease_id: str) -> SubmitOutcome:
        """Return what a trajectory of a lease that is not open gets.

        `DUPLICATE` if the lease was fulfilled (of the last `_REMEMBERED_LEASES`).
        """
        fulfilled = lease_id in self._fulfilled
        return SubmitOutcome.DUPLICATE if fulfilled else SubmitOutcome.LEASE_ENDED

    def close(self, lease_id: str) -> Lease | None:
        """Close and return a lease; None if it is not open."""
        lease = self._open.pop(lease_id, None)
        if lease is not None:
            held = self._held[lease.worker_id]
            del held[lease_id]
            self.num_missing -= lease.num_missing
            self.num_accepted -= len(lease.accepted)
            if not held:
                del self._held[lease.worker_id]
        return lease

    def get(self, lease_id: str) -> Lease | None:
        return self._open.get(lease_id)

    def has_issued(self, lease_id: str) -> bool:
        return lease_id.startswith(f"{self._prefix}-")

    def granted_s(self, lease_id: str) -> float:
        lease = self._open.get(lease_id)
        return -inf if lease is None else lease.expires_s - self._timeout_s

    def expired_leases(self) -> list[Lease]:
        now_s = self._clock()
        return list(takewhile(lambda lease: lease.expires_s <= now_s, self._open.values()))

    def held_by(self, worker_id: str, lease_ids: Collection[str] = ()) -> list[Lease]:
        """Return the open leases of one worker, oldest first; with ids, only those among them."""
        return [
            lease
            for lease in self._held.get(worker_id, {}).values()
            if not lease_ids or lease.lease_id in lease_ids
        ]

    def prompts(self) -> Collection[int]:
        return {lease.prompt_index for lease in self._open.values()}

    def in_flight_by_worker(self) -> Mapping[str, int]:
        return {
            worker_id: sum(lease.num_missing for lease in held.values())
            for worker_id, held in self._held.items()
        }

    def all(self) -> list[Lease]:
        return list(self._open.values())

    def restore(
        self, leases: Iterable[Lease], *, next_grant_number: int, next_group_number: int
    ) -> None:
        for lease in leases:
            self._add(lease)
        self.next_grant_number, self.next_group_number = next_grant_number, next_group_number

    def _add(self, lease: Lease) -> None:
        lease.expires_s = self._clock() + self._timeout_s
        self._open[lease.lease_id] = self._held[lease.worker_id][lease.lease_id] = lease
        self.num_missing += lease.num_missing
        self.num_accepted += len(lease.accepted)


class GroupBuffer:
    """Complete groups that wait for their optimizer step, in the order of consumption.

    The group with the oldest token comes first; groups of equal age come in the order of their
    grants. Each step consumes `prompts_per_step` of them. A group that arrives later can only
    delay the others, so a group that is late in this order stays late.
    """

    def __init__(self, *, prompts_per_step: int) -> None:
        self._prompts_per_step = prompts_per_step
        self._groups: list[tuple[int, Lease]] = []
        """Groups, each with its oldest step, sorted; groups of one step compare by their grants."""
        self.num_trajectories = 0
        """Trajectories of all groups."""
        self.num_changes = 0
        """Times that groups were added or removed."""

    def groups(self) -> list[Lease]:
        return [group for _, group in self._groups]

    def add(self, groups: Iterable[Lease]) -> None:
        for group in groups:
            insort(self._groups, (group.oldest_step, group))
            self.num_trajectories += len(group.accepted)
            self.num_changes += 1

    def take_batch(self) -> list[Lease] | None:
        """Remove and return the groups of one step; return None while there are too few.

        Remove what is late before. The groups of a batch stand in the order of their numbers, so
        that its sums do not depend on which of them had to be leased again.
        """
        if len(self._groups) < self._prompts_per_step:
            return None
        batch = [group for _, group in self._groups[: self._prompts_per_step]]
        self.remove([group.lease_id for group in batch])
        return sorted(batch, key=lambda group: group.group_number)

    def remove(self, lease_ids: Collection[str]) -> list[Lease]:
        """Remove and return the groups of these leases that are buffered, in the order of those."""
        wanted = {lease_id: place for place, lease_id in enumerate(lease_ids)}
        found = [group for _, group in self._groups if group.lease_id in wanted]
        self._groups = [each for each in self._groups if each[1].lease_id not in wanted]
        self.num_trajectories -= sum(len(group.accepted) for group in found)
        self.num_changes += 1
        return sorted(found, key=lambda group: wanted[group.lease_id])

    def late(self, *, step: int, max_policy_lag_steps: int) -> list[Lease]:
        """Return the groups that will be beyond the lag limit at their turn, by their grants.

        A token of step s may be consumed up to step s + lag; a late group takes no place.

        step: steps before the next batch.
        """
        late, place = [], 0
        for oldest_step, group in self._groups:
            if oldest_step + max_policy_lag_steps < step + place // self._prompts_per_step:
                late.append(group)
            else:
                place += 1
        return sorted(late)
