"""What a worker asks the learner for, and what the learner assigns to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import xxhash

from vcpo.records.weight_updates import NO_UPDATES, WeightUpdates
from vcpo_learner.ledger.leases import OpenLease


class Purpose(StrEnum):
    """What a lease's trajectories are used for."""

    TRAIN = "train"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRequest:
    """A worker's request for prompts."""

    worker_id: str
    rollout_group: str
    incarnation: str
    held_policy_version: int
    max_trajectories: int
    weight_updates: WeightUpdates = NO_UPDATES
    """Counted by the worker since its start."""
    peak_memory_bytes: int = 0
    """Most memory of the worker's process since its start."""
    held_lease_ids: frozenset[str] | None = None
    """All leases that the worker holds; None if it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One lease and its purpose."""

    purpose: Purpose
    lease: OpenLease

    def seed(self, run_seed: int) -> int:
        """Return the seed of the lease's responses, 64 bits.

        The leases of a group share it as long as they have the same draw. An evaluation at another
        version is seeded anew.
        """
        lease = self.lease
        parts = [run_seed, self.purpose, lease.group_number, lease.draw]
        if self.purpose is Purpose.EVALUATION:
            parts.append(lease.granted_policy_version)
        return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode())
