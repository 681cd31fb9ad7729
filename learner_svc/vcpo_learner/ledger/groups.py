"""Prompt groups: complete, waiting for their optimizer step, and written to checkpoints."""

from __future__ import annotations

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
    lease_id: str = field(compare=False)
    prompt_index: int = field(compare=False)
    attempt: int = field(compare=False)
    trajectories: tuple[Trajectory, ...] = field(compare=False)

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
    """Complete groups that wait for their optimizer step. Owner: the ledger."""

    def __init__(self, *, prompts_per_step: int) -> None:
        self._prompts_per_step = prompts_per_step
        self._groups: list[Group] = []

    @property
    def num_trajectories(self) -> int:
        """Trajectories of all groups."""
        return sum(len(group.trajectories) for group in self._groups)

    def groups(self) -> list[Group]:
        """Return all buffered groups."""
        return list(self._groups)

    def add(self, groups: Iterable[Group]) -> None:
        """Buffer groups."""
        self._groups.extend(groups)

    def take_batch(self) -> list[Group] | None:
        """Remove and return the groups of one step; return None while there are too few.

        Call `order` before, and remove what is late.
        """
        if len(self._groups) < self._prompts_per_step:
            return None
        batch = self._groups[: self._prompts_per_step]
        self._groups = self._groups[self._prompts_per_step :]
        return batch

    def remove(self, lease_ids: Sequence[str]) -> list[Group]:
        """Remove and return the groups of these leases that are buffered, in their order."""
        found = {group.lease_id: group for group in self._groups if group.lease_id in lease_ids}
        self._groups = [group for group in self._groups if group.lease_id not in found]
        return [found[lease_id] for lease_id in lease_ids if lease_id in found]

    def order(self, *, policy_version: int, max_lag_steps: int) -> list[Group]:
        """Put the groups into the order of consumption; return those that will be too late.

        The late ones stay in the buffer, behind the others, until they are removed.
        """
        in_time = groups_in_time(
            self._groups,
            policy_version=policy_version,
            prompts_per_step=self._prompts_per_step,
            max_lag_steps=max_lag_steps,
        )
        kept = {group.grant_number for group in in_time}
        late = sorted(group for group in self._groups if group.grant_number not in kept)
        self._groups = [*in_time, *late]
        return late


def groups_in_time(
    groups: Iterable[Group], *, policy_version: int, prompts_per_step: int, max_lag_steps: int
) -> list[Group]:
    """Return the groups that can be consumed within the lag bound, in the order of consumption.

    Each version from `policy_version` on consumes `prompts_per_step` groups. The group with the
    oldest token comes first; groups of equal age come in the order of their grants. A group that
    arrives later can only delay the others, so a group that is late in this order stays late.
    """
    in_time: list[Group] = []
    # Groups compare by their grants. Their age is computed once: this runs at every submission.
    for oldest_version, group in sorted((one.oldest_policy_version, one) for one in groups):
        consumed_at_version = policy_version + len(in_time) // prompts_per_step
        if oldest_version >= consumed_at_version - max_lag_steps:
            in_time.append(group)
    return in_time


def group_from_lease(lease: OpenLease) -> Group:
    """Return the group of a lease whose trajectories have all arrived."""
    return Group(
        grant_number=lease.grant_number,
        lease_id=lease.lease_id,
        prompt_index=lease.prompt_index,
        attempt=lease.attempt,
        trajectories=(*lease.kept, *lease.arrived.values()),
    )


def group_to_message(group: Group) -> ledger_pb2.BufferedGroup:
    """Write a group for a checkpoint."""
    return ledger_pb2.BufferedGroup(
        lease_id=group.lease_id,
        grant_number=group.grant_number,
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
        lease_id=message.lease_id,
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
