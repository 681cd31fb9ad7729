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
from dataclasses import dataclass

from vcpo.api import VCPORunSpec
from vcpo.records.reasons import NO_UPDATES, WeightUpdates
from vcpo.wire.versions import step_of
from vcpo_learner.ledger.evaluation import EvaluationRound
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.ledger.ledger import TrajectoryLedger


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRequest:
    """A worker's request for prompts."""

    worker_id: str
    process_id: str
    """Random, of the worker's process."""
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


class Admission:
    """Decides how much work is granted. Owner: the learner's event loop."""

    def __init__(self, spec: VCPORunSpec, ledger: TrajectoryLedger) -> None:
        self._spec = spec
        self._batch = spec.batch
        self._ledger = ledger

    def grant(
        self,
        request: WorkRequest,
        current: EvaluationRound,
        *,
        policy_version: int,
        lag_limit_steps: int,
    ) -> list[Lease]:
        """Grant a worker what is admissible: prompts of the evaluation first, then of training.

        policy_version: of the learner; a worker cannot hold a newer one.
        """
        leases: list[Lease] = []
        if current.is_running:
            leases = current.grant(
                request.worker_id,
                max_trajectories=request.max_trajectories,
                policy_version=policy_version,
            )
        if leases or current.is_exclusive:
            return leases
        return self._ledger.grant(
            request.worker_id,
            num_groups=self._training_groups(request, policy_version, lag_limit_steps),
            policy_version=policy_version,
            # An older token could not be trained on, not even in the very next batch.
            oldest_step=max(0, self._ledger.step - lag_limit_steps),
        )

    def _training_groups(
        self, request: WorkRequest, policy_version: int, lag_limit_steps: int
    ) -> int:
        """Return how many training prompts a worker may be granted now."""
        counts, batch = self._ledger.counts(), self._batch
        accepted = counts.buffered + counts.consumed
        admissible = admissible_trajectories(
            lag_limit_steps=lag_limit_steps,
            held_step=step_of(min(request.held_policy_version, policy_version)),
            batch_trajectories=batch.trajectories,
            accepted=accepted,
            in_flight=counts.in_flight,
            over_provision_ratio=batch.over_provision_ratio,
        )
        remaining = self._spec.steps * batch.trajectories - accepted - counts.in_flight
        most = min(admissible, remaining, request.max_trajectories)
        return self._ledger.num_groups_within(most)

    def surplus_trajectories(self, step: int) -> int:
        if self._batch.over_provision_ratio == 1.0:
            return 0
        counts = self._ledger.counts()
        return surplus_trajectories(
            max_policy_lag_steps=self._spec.algorithm.max_policy_lag_steps,
            step=step,
            batch_trajectories=self._batch.trajectories,
            accepted=counts.buffered + counts.consumed,
            in_flight=counts.in_flight,
            over_provision_ratio=self._batch.over_provision_ratio,
        )


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
