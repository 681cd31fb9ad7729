"""Quota: the number of trajectories that one worker may hold in leases.

Admission bounds the trajectories in flight of all workers together. Without a bound per worker, a
few workers that lease and never submit would hold all of them until the leases expire, repeatedly.

```
trusted     has submitted                    as many as it has slots
new         has not submitted yet            an equal share of the pool, at least one group
doubted     let a lease expire since then    one group
```

The pool is half of the trajectories that may be in flight, and all of them while no worker is
trusted. New and doubted workers together hold at most the pool, so trusted workers always have the
other half.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Trust(StrEnum):
    """Trust in a worker, from its submissions."""

    TRUSTED = "trusted"
    """It has submitted."""
    NEW = "new"
    """It has not submitted yet."""
    DOUBTED = "doubted"
    """It let a lease expire after its last submission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolders:
    """The workers that share the trajectories in flight; all counts are at least 0."""

    budget: int
    """Trajectories that may be in flight in all."""
    num_trusted: int
    """Number of trusted workers."""
    num_new: int
    """Number of new workers."""
    held_by_untrusted: int
    """Trajectories leased by new, doubted and unregistered workers."""


def quota_trajectories(
    holders: LeaseHolders, trust: Trust, *, places: int, held: int, group: int
) -> int:
    """Return the number of trajectories that a worker may be granted now, >= 0.

    Admission may allow fewer.
    places: trajectories that the worker can generate at one time.
    held: trajectories that it has in flight.
    group: trajectories of one lease, >= 1; a worker cannot use fewer.
    """
    free = max(0, places - held)
    if trust is Trust.TRUSTED:
        return free
    pool = holders.budget if holders.num_trusted == 0 else holders.budget // 2
    share = pool // max(1, holders.num_new) if trust is Trust.NEW else 0
    return max(0, min(free, max(group, share) - held, pool - holders.held_by_untrusted))
