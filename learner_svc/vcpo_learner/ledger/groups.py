"""Prompt groups: accepted, not yet trained on, and written down with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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
        """Tokens of its answers that the policy sampled."""
        return sum(trajectory.num_sampled_tokens for trajectory in self.trajectories)

    @property
    def oldest_policy_version(self) -> int:
        """The oldest version that sampled a token of the group."""
        return min(trajectory.oldest_policy_version for trajectory in self.trajectories)


def groups_in_time(
    groups: Iterable[Group], *, policy_version: int, prompts_per_step: int, max_lag_steps: int
) -> list[Group]:
    """Those that can be consumed within the lag bound, in the order in which they are.

    That with the oldest token is first, among equals that granted first, `prompts_per_step` at
    each version from `policy_version` on. What arrives later pushes others back and brings none
    forward, so for one that comes too late in this order there is no other.
    """
    in_time: list[Group] = []
    for group in sorted(groups, key=lambda one: (one.oldest_policy_version, one.grant_number)):
        consumed_at_version = policy_version + len(in_time) // prompts_per_step
        if group.oldest_policy_version >= consumed_at_version - max_lag_steps:
            in_time.append(group)
    return in_time


def group_from_lease(lease: OpenLease) -> Group:
    """The group of a lease whose trajectories have all arrived."""
    return Group(
        grant_number=lease.grant_number,
        lease_id=lease.lease_id,
        prompt_index=lease.prompt_index,
        attempt=lease.attempt,
        trajectories=tuple(lease.arrived.values()),
    )


def group_to_message(group: Group) -> ledger_pb2.BufferedGroup:
    """Write a group for a checkpoint; failed attempts are not kept."""
    return ledger_pb2.BufferedGroup(
        lease_id=group.lease_id,
        grant_number=group.grant_number,
        prompt_index=group.prompt_index,
        trajectories=[trajectory_to_message(member) for member in group.trajectories],
    )


def group_from_message(message: ledger_pb2.BufferedGroup) -> Group:
    """Read a group of a checkpoint.

    Raises:
        InvalidMessageError: naming the first field that is not as it must be.
    """
    return Group(
        grant_number=message.grant_number,
        lease_id=message.lease_id,
        prompt_index=message.prompt_index,
        attempt=1,
        trajectories=tuple(
            trajectory_from_message(member, path=f"buffered[].trajectories[{index}]")
            for index, member in enumerate(message.trajectories)
        ),
    )
