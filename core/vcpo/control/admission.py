"""Admission: the number of new trajectories that may start without becoming too old for training.

Number the trajectories that are in the system or were trained on: `accepted` of them (buffered +
consumed), then `in_flight` more. A worker that samples from version v is granted the next
trajectory, number j = accepted + in_flight counted from 0, only while

    j < (k + 1 + v) * B,

with B trajectories per optimizer step and k the lag limit in policy versions. With a ratio r of
over-provisioning (APRIL, arXiv 2509.18521) up to u + (r - 1) min(u, B) may be in flight, where
u = (k + 1 + v) B - accepted can still be used in time. docs/inside/mathematics.md has the proof.
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
