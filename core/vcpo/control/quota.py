"""Quota of leases: how much one worker may hold, so that none keeps the work from the others.

Admission bounds what is in flight in all; without a bound for each worker, a few that lease and
never deliver hold all of it until their leases run out, again and again.

```
trusted     has delivered               as much as it has places for
new         has not delivered yet       an equal share of the newcomers' pool, at least a group
doubted     let a lease run out since   one group
```

The pool is half of what may be in flight, and all of it while no worker is trusted. New and doubted
workers together hold no more than the pool: the other half is always with workers that deliver.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Trust(StrEnum):
    """What a worker's deliveries say of it."""

    TRUSTED = "trusted"
    NEW = "new"
    DOUBTED = "doubted"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolders:
    """Who shares the work; all counts at least 0."""

    budget: int
    """Trajectories that may be in flight in all."""
    num_trusted: int
    """Workers that have delivered."""
    num_new: int
    """Workers that are new."""
    held_by_untrusted: int
    """Trajectories that new and doubted workers hold, and workers not heard of any more."""


def quota_trajectories(
    holders: LeaseHolders, trust: Trust, *, places: int, held: int, group: int
) -> int:
    """Trajectories that a worker may be granted now, >= 0, beside what admission lets it have.

    places: Trajectories that it can have under way at one time.
    held: Trajectories in flight with it.
    group: Trajectories of one lease; the least that anybody can use, >= 1.
    """
    free = max(0, places - held)
    if trust is Trust.TRUSTED:
        return free
    pool = holders.budget if holders.num_trusted == 0 else holders.budget // 2
    share = pool // max(1, holders.num_new) if trust is Trust.NEW else 0
    return max(0, min(free, max(group, share) - held, pool - holders.held_by_untrusted))
