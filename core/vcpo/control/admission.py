"""Admission: the number of new trajectories that may start without becoming too old for training.

Problem. A trajectory ages between sampling and training: during generation and in the buffer.
Dropping trajectories that are too old wastes generation, and it is biased, because long responses
are dropped most often.

Rule. Number the trajectories that are in the system or were trained on: `accepted` of them
(buffered + consumed), then `in_flight` more. A worker that samples from version v is granted the
next trajectory, number j = accepted + in_flight counted from 0, only while

    j < (k + 1 + v) * B,

with B trajectories per optimizer step and k the lag limit in policy versions.

Proof of the bound. Let trajectories be consumed in the order of the grants (first in, first out),
and let version n be the parameters after n steps of B trajectories each. Trajectory j is trained on
after floor(j/B) steps, so at version floor(j/B). The rule says j/B < k + 1 + v, hence

    floor(j/B) <= k + v,    and its lag    floor(j/B) - v <= k.

A drop moves all later trajectories forward, to an earlier version, so the bound still holds. A
prompt that is granted again gets a new number at the end and is tested again. A change of k applies
to later grants only; a trajectory granted under a larger k is dropped at consumption if it is too
old by then (`vcpo.control.throttle`).

Why the *worker's* version. AReaL's formula has the learner's version in place of v
(areal/infra/staleness_manager.py, `get_capacity`). But a worker samples from the version that it
holds. While the worker has not fetched the learner's newest version, AReaL's formula admits work
whose lag is larger by the difference. Tokens sampled after a weight update in mid-response are
newer than v.

Why the check at consumption stays. The proof assumes the order of grants. The learner takes ready
trajectories and does not wait for a slow one. Each trajectory that overtakes the slow one moves it
one place back, past the number that was tested. Its lag is then known from the versions of its
tokens only. For the same reason ready trajectories are taken in the order of their oldest tokens
(earliest deadline first): if any order of the ready trajectories keeps the bound, this order does.

Over-provisioning (APRIL, arXiv 2509.18521). u = (k + 1 + v) B - accepted is the number of
trajectories that can still be used in time. A ratio r above 1 allows r times the next batch in
flight, so the limit is

    u + (r - 1) min(u, B).

The first trajectories to finish are used. When a step's batch is complete, trajectories in flight
beyond this limit are surplus: the worker is asked to interrupt them, and they are resumed after the
step, when their tokens are one version older. The proof holds for r = 1; for larger r the check at
consumption holds the bound.

The cost of r. Of the trajectories started at version v at most (k + 1) B are ever used, in any
order. Of (k + r) B trajectories a share of up to (r - 1) / (k + r) is therefore lost. This is why
the ratio applies to a batch, as in APRIL, and not to u: the share would then be (r - 1) / r for
any k.
"""

import math


def admissible_trajectories(
    *,
    lag_limit_steps: int,
    held_step: int,
    batch_trajectories: int,
    accepted: int,
    in_flight: int,
    over_provision_ratio: float = 1.0,
) -> int:
    """Return the number of trajectories that a worker may be granted now.

    max(0, floor(u + (r - 1) min(u, B)) - in_flight) with u = (k + 1 + v) B - accepted >= 0; see the
    module.

    lag_limit_steps: k, >= 0; 0 is synchronous training.
    held_step: v, steps behind the version that the worker samples from. The caller ensures that it
        is not above the learner's, also after a restart from an older checkpoint.
    batch_trajectories: B >= 1, trajectories consumed by one optimizer step.
    accepted: buffered + consumed in the surviving history, >= 0, without dropped trajectories.
    in_flight: granted and not yet submitted, >= 0.
    over_provision_ratio: r >= 1.
    """
    _require_at_least("lag_limit_steps", lag_limit_steps, 0)
    _require_at_least("held_step", held_step, 0)
    _require_at_least("batch_trajectories", batch_trajectories, 1)
    _require_at_least("accepted", accepted, 0)
    _require_at_least("in_flight", in_flight, 0)
    _require_at_least("over_provision_ratio", over_provision_ratio, 1)
    usable = (lag_limit_steps + 1 + held_step) * batch_trajectories - accepted
    return max(0, _in_flight_limit(usable, batch_trajectories, over_provision_ratio) - in_flight)


def surplus_trajectories(
    *,
    max_policy_lag_steps: int,
    step: int,
    batch_trajectories: int,
    accepted: int,
    in_flight: int,
    over_provision_ratio: float,
) -> int:
    """Return the number of trajectories in flight beyond the admission limit, >= 0.

    max_policy_lag_steps: k of the run. A throttle does not interrupt work in flight.
    step: v of the learner, because surplus depends on what the learner still needs.
    Other arguments: as for `admissible_trajectories`.
    """
    usable = (max_policy_lag_steps + 1 + step) * batch_trajectories - accepted
    return max(0, in_flight - _in_flight_limit(usable, batch_trajectories, over_provision_ratio))


def _in_flight_limit(usable: int, batch_trajectories: int, over_provision_ratio: float) -> int:
    """Return the number of trajectories that may be in flight, >= 0.

    usable: u, trajectories that can still be used in time; a negative number counts as 0.
    """
    usable = max(0, usable)
    return usable + math.floor((over_provision_ratio - 1.0) * min(usable, batch_trajectories))


def _require_at_least(name: str, value: float, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
