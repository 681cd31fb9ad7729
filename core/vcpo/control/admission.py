"""Admission: how much new work may start, so that nothing is too old when it is trained on.

Problem. A trajectory waits between sampling and training: while it is generated, and in the buffer.
Dropping what got too old wastes generation, and is biased, since long answers are dropped most.

Rule. Number the trajectories that are in the system or have left it by training: `accepted` of them
(buffered + consumed), `in_flight` more. A worker that samples from version v is granted the next
one, with number j = accepted + in_flight counted from 0, only while

    j < (k + 1 + v) * B,

with B trajectories per optimizer step and k the admission lag in policy versions.

Proof of the bound. Let consumption be first in, first out in the order of the grants, and version n
the parameters after n steps of B trajectories each. Then trajectory j is trained on when floor(j/B)
steps have been taken, so at version floor(j/B). The rule says j/B < k + 1 + v, hence

    floor(j/B) <= k + v,    and its lag    floor(j/B) - v <= k.

A drop moves everything behind it forward, to an earlier version, so the bound survives it; what is
granted again gets a new number at the end and is tested anew. A later k binds later grants; what
was granted under a larger one is dropped when its turn comes too late (`vcpo.control.throttle`).

Why the *worker's* version. AReaL's formula has the learner's version in the place of v
(areal/infra/staleness_manager.py, `get_capacity`). A worker samples from what it holds; while it
has not yet fetched the learner's newest version the same inequality would admit work whose lag is
larger by that difference. Tokens sampled after a swap in the middle of an answer are newer than v.

Why the check at consumption stays. The proof leans on the order. A straggler is overtaken when the
learner takes what is ready rather than wait for it; each trajectory that overtakes it pushes it one
place back, past the number that was tested. Then only a look at its tokens' versions tells its lag.
For the same reason what is ready is taken by the age of its oldest token: whatever order of the
ready ones keeps the bound, that one does too (earliest deadline first).

Over-provisioning (APRIL, arXiv 2509.18521). u = (k + 1 + v) B - accepted is what can still be used
in time. With a ratio r above 1, r of the next batch may be in flight in the place of one,

    u + (r - 1) min(u, B):

the first to finish are used, and when a step's batch is complete what is in flight beyond the same
limit is surplus. It is cut and gone on with after the step, its tokens by then a version older. The
proof holds for r = 1; above it the check at consumption holds the bound.

What r costs. Of what is begun at version v no more than (k + 1) B is ever used, in whatever order,
so of (k + r) B a share of up to (r - 1) / (k + r) is lost. That is why the ratio is of a batch, as
it is APRIL's, and not of u: then the share would be (r - 1) / r for any k.
"""

import math


def admissible_trajectories(
    *,
    admission_lag_steps: int,
    held_policy_version: int,
    batch_trajectories: int,
    accepted: int,
    in_flight: int,
    over_provision_ratio: float = 1.0,
) -> int:
    """Trajectories that a worker may be granted now.

    max(0, floor(u + (r - 1) min(u, B)) - in_flight) with u = (k + 1 + v) B - accepted >= 0, see the
    module.

    admission_lag_steps: k, in policy versions, >= 0; 0 is synchronous training.
    held_policy_version: v, the version the worker samples from; never above the learner's, which
        the caller sees to when a restart has taken the learner back to an older version.
    batch_trajectories: B >= 1, trajectories consumed by one optimizer step.
    accepted: Buffered + consumed in the surviving history, >= 0; not what was dropped.
    in_flight: Granted and not yet answered, >= 0.
    over_provision_ratio: r >= 1.
    Raises: ValueError naming the argument that is out of its range.
    """
    _require_at_least("admission_lag_steps", admission_lag_steps, 0)
    _require_at_least("held_policy_version", held_policy_version, 0)
    _require_at_least("batch_trajectories", batch_trajectories, 1)
    _require_at_least("accepted", accepted, 0)
    _require_at_least("in_flight", in_flight, 0)
    _require_at_least("over_provision_ratio", over_provision_ratio, 1)
    usable = (admission_lag_steps + 1 + held_policy_version) * batch_trajectories - accepted
    return max(0, _in_flight_limit(usable, batch_trajectories, over_provision_ratio) - in_flight)


def surplus_trajectories(
    *,
    max_lag_steps: int,
    policy_version: int,
    batch_trajectories: int,
    accepted: int,
    in_flight: int,
    over_provision_ratio: float,
) -> int:
    """Trajectories in flight beyond what admission would let be there, see the module; >= 0.

    max_lag_steps: k of the run, not a throttled one: what is under way is not cut for that.
    policy_version: v of the learner: what its worker holds says nothing about what is needed.
    The rest as for `admissible_trajectories`.
    """
    usable = (max_lag_steps + 1 + policy_version) * batch_trajectories - accepted
    return max(0, in_flight - _in_flight_limit(usable, batch_trajectories, over_provision_ratio))


def _in_flight_limit(usable: int, batch_trajectories: int, over_provision_ratio: float) -> int:
    """Trajectories that may be in flight, of which `usable` can be used in time; >= 0."""
    usable = max(0, usable)
    return usable + math.floor((over_provision_ratio - 1.0) * min(usable, batch_trajectories))


def _require_at_least(name: str, value: float, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
