"""Prompt groups: complete, waiting for their optimizer step, and written to checkpoints."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from vcpo.wire.trajectory import Trajectory, trajectory_from_message, trajectory_to_message
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.ledger.leases import OpenLease


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Group:
    """All trajectories of one prompt, accepted and not yet consumed."""

    grant_number: int
    group_number: int = field(compare=False)
    """Number of the first grant of the group."""
    lease_id: str = field(compare=False)
    worker_id: str = field(compare=False)
    """Worker that held the lease. It may have resumed responses that another one began, and what a
    learner accepted before it stopped may be of another one."""
    prompt_index: int = field(compare=False)
    attempt: int = field(compare=False)
    trajectories: tuple[Trajectory, ...] = field(compare=False)

    @property
    def workers(self) -> set[str | None]:
        """The workers that delivered its trajectories; None for responses of several."""
        return {self.worker_id, *(trajectory.worker_id for trajectory in self.trajectories)}

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of the responses that a policy sampled."""
        return sum(trajectory.num_sampled_tokens for trajectory in self.trajectories)

    @property
    def oldest_policy_version(self) -> int:
        """The oldest version that sampled a token of the group."""
        return min(trajectory.oldest_policy_version for trajectory in self.trajectories)

    @property
    def newest_policy_version(self) -> int:
        """The newest version that sampled a token of the group."""
        return max(trajectory.newest_policy_version for trajectory in self.trajectories)


class GroupBuffer:
    """Complete groups that wait for their optimizer step, in the order of consumption.

    The group with the oldest token comes first; groups of equal age come in the order of their
    grants. Each version consumes `prompts_per_step` of them. A group that arrives later can only
    delay the others, so a group that is late in this order stays late.

    Owner: the ledger. Every submission asks what is late. The answer takes a time that grows with
    the versions in the buffer and the late groups, not with all groups.
    """

    def __init__(self, *, prompts_per_step: int) -> None:
        self._prompts_per_step = prompts_per_step
        self._groups: list[tuple[int, Group]] = []
        """With the oldest version of each, sorted; groups compare by their grants."""
        self._by_lease: dict[str, tuple[int, Group]] = {}
        """The same by lease."""
        self._num_of_version: Counter[int] = Counter()
        """Number of groups by their oldest version."""
        self._num_trajectories = 0

    @property
    def num_trajectories(self) -> int:
        """Trajectories of all groups."""
        return self._num_trajectories

    def groups(self) -> list[Group]:
        """Return all groups, in the order of consumption."""
        return [group for _, group in self._groups]

    def add(self, groups: Iterable[Group]) -> None:
        """Buffer groups."""
        for group in groups:
            oldest_version = group.oldest_policy_version
            entry = oldest_version, group
            insort(self._groups, entry)
            self._by_lease[group.lease_id] = entry
            self._num_of_version[oldest_version] += 1
            self._num_trajectories += len(group.trajectories)

    def take_batch(self) -> list[Group] | None:
        """Remove and return the groups of one step; return None while there are too few.

        Remove what is late before. The groups of a batch stand in the order of their numbers, so
        that its sums do not depend on which of them had to be leased again.
        """
        if len(self._groups) < self._prompts_per_step:
            return None
        entries = self._groups[: self._prompts_per_step]
        del self._groups[: self._prompts_per_step]
        self._forget(entries)
        return sorted((group for _, group in entries), key=lambda group: group.group_number)

    def remove(self, lease_ids: Sequence[str]) -> list[Group]:
        """Remove and return the groups of these leases that are buffered, in their order."""
        found = dict.fromkeys(lease_id for lease_id in lease_ids if lease_id in self._by_lease)
        entries = [self._by_lease[lease_id] for lease_id in found]
        for entry in entries:
            del self._groups[bisect_left(self._groups, entry)]
        self._forget(entries)
        return [group for _, group in entries]

    def late(self, *, policy_version: int, max_lag_steps: int) -> list[Group]:
        """Return the groups that will be beyond the lag bound at their turn, by their grants.

        policy_version: version that the next batch is applied to.
        """
        num_in_time = self._num_in_time(policy_version, max_lag_steps)
        if sum(num_in_time.values()) == len(self._groups):
            return []
        late, first = [], 0
        for oldest_version, number in num_in_time.items():
            end = first + self._num_of_version[oldest_version]
            late += [group for _, group in self._groups[first + number : end]]
            first = end
        return sorted(late)

    def _num_in_time(self, policy_version: int, max_lag_steps: int) -> Counter[int]:
        """Count the groups that are consumed within the lag bound, by their oldest version, rising.

        Tokens of version v may be consumed up to version v + lag, so before the place
        `(v + lag + 1 - policy_version) * prompts_per_step`.
        """
        num_in_time: Counter[int] = Counter()
        place = 0
        for version in sorted(self._num_of_version):
            places = (version + max_lag_steps + 1 - policy_version) * self._prompts_per_step
            number = max(0, min(self._num_of_version[version], places - place))
            num_in_time[version] = number
            place += number
        return num_in_time

    def _forget(self, entries: Sequence[tuple[int, Group]]) -> None:
        """Take entries that were removed out of the index and the counts."""
        for oldest_version, group in entries:
            del self._by_lease[group.lease_id]
            self._num_of_version[oldest_version] -= 1
            if not self._num_of_version[oldest_version]:
                del self._num_of_version[oldest_version]
            self._num_trajectories -= len(group.trajectories)


def group_from_lease(lease: OpenLease) -> Group:
    """Return the group of a lease whose trajectories have all arrived, by their numbers."""
    members = (*lease.kept, *lease.arrived.values())
    return Group(
        grant_number=lease.grant_number,
        group_number=lease.group_number,
        lease_id=lease.lease_id,
        worker_id=lease.worker_id,
        prompt_index=lease.prompt_index,
        attempt=lease.attempt,
        trajectories=tuple(sorted(members, key=lambda member: member.number)),
    )


def group_to_message(group: Group) -> ledger_pb2.BufferedGroup:
    """Write a group for a checkpoint."""
    return ledger_pb2.BufferedGroup(
        lease_id=group.lease_id,
        worker_id=group.worker_id,
        grant_number=group.grant_number,
        group_number=group.group_number,
        prompt_index=group.prompt_index,
        attempt=group.attempt,
        trajectories=[trajectory_to_message(member) for member in group.trajectories],
    )


def group_from_message(message: ledger_pb2.BufferedGroup) -> Group:
    """Read a group of a checkpoint.

    Raises:
        InvalidMessageError: naming the first invalid field.
    """
    return Group(
        grant_number=message.grant_number,
        group_number=message.group_number,
        lease_id=message.lease_id,
        worker_id=message.worker_id,
        prompt_index=message.prompt_index,
        attempt=message.attempt,
        trajectories=tuple(
            trajectory_from_message(member, path=f"buffered[].trajectories[{index}]")
            for index, member in enumerate(message.trajectories)
        ),
    )


def newest_trajectories(
    groups: Sequence[Sequence[Trajectory]], *, policy_version: int, num_tokens: int
) -> list[Trajectory]:
    """Return trajectories until they hold `num_tokens` tokens of a version; all if too few.

    One trajectory of every group comes before a second of any group.
    """
    found: list[Trajectory] = []
    for trajectory in filter(None, chain.from_iterable(zip_longest(*groups))):
        if num_tokens <= 0:
            break
        if (own := trajectory.num_tokens_of(policy_version)) > 0:
            found.append(trajectory)
            num_tokens -= own
    return found
