"""How much new work one worker may be granted, and how much of the granted work is surplus.

`vcpo.control.admission` bounds the age of tokens; this module gives it the run's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from vcpo.api import VCPORunSpec
from vcpo.control.admission import admissible_trajectories, surplus_trajectories
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
