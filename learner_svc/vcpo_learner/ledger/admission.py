"""How much new work one worker may be granted, and how much of the granted work is surplus.

The formulas are pure functions: `vcpo.control.admission` bounds the age of tokens, and
`vcpo.control.quota` bounds what a single worker holds. This module gives them the run's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vcpo.api import VCPORunSpec
from vcpo.control.admission import admissible_trajectories, surplus_trajectories
from vcpo.control.quota import LeaseHolders, Trust, quota_trajectories
from vcpo.records.weight_updates import NO_UPDATES, WeightUpdates
from vcpo_learner.ledger.evaluation import EvaluationRound
from vcpo_learner.ledger.lease import Lease
from vcpo_learner.ledger.trajectory_ledger import TrajectoryLedger
from vcpo_learner.ledger.worker_registry import WorkerRegistry


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


class Admission:
    """Decides how much work is granted. Owner: the learner's event loop."""

    def __init__(
        self, spec: VCPORunSpec, ledger: TrajectoryLedger, registry: WorkerRegistry
    ) -> None:
        self._spec = spec
        self._batch = spec.batch
        self._max_sequences = {
            group.name: group.max_concurrent_sequences for group in spec.rollouts
        }
        self._ledger = ledger
        self._registry = registry

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
                max_trajectories=self._evaluation_responses(request, current),
                policy_version=policy_version,
            )
        if leases or current.is_exclusive:
            return leases
        return self._ledger.grant(
            request.worker_id,
            num_groups=self._training_groups(request, policy_version, lag_limit_steps),
            policy_version=policy_version,
            # An older token could not be trained on, not even in the very next batch.
            oldest_partial_version=max(0, self._ledger.version - lag_limit_steps),
        )

    def _training_groups(
        self, request: WorkRequest, policy_version: int, lag_limit_steps: int
    ) -> int:
        """Return how many training prompts a worker may be granted now."""
        counts, batch = self._ledger.counts(), self._batch
        accepted = counts.buffered + counts.consumed
        admissible = admissible_trajectories(
            lag_limit_steps=lag_limit_steps,
            held_policy_version=min(request.held_policy_version, policy_version),
            batch_trajectories=batch.trajectories,
            accepted=accepted,
            in_flight=counts.in_flight,
            over_provision_ratio=batch.over_provision_ratio,
        )
        remaining = self._spec.steps * batch.trajectories - accepted - counts.in_flight
        max_groups = self._max_sequences_of(request.rollout_group) // batch.trajectories_per_prompt
        quota = self._quota(
            request.worker_id,
            self._ledger.leases.in_flight_by_worker(),
            budget=counts.in_flight + admissible,
            places=max_groups * batch.trajectories_per_prompt,
            group=batch.trajectories_per_prompt,
        )
        most = min(admissible, remaining, quota, request.max_trajectories)
        return self._ledger.num_groups_within(most)

    def _evaluation_responses(self, request: WorkRequest, current: EvaluationRound) -> int:
        """Return how many responses of a round a worker may be granted now.

        The budget is the number of missing responses. As it shrinks, so does the number that
        untrusted workers may hold, so they cannot keep a round from ending.
        """
        quota = self._quota(
            request.worker_id,
            current.leases.in_flight_by_worker(),
            budget=current.num_missing,
            places=self._max_sequences_of(request.rollout_group),
            group=self._spec.evaluation.samples_per_prompt,
        )
        return min(request.max_trajectories, quota)

    def surplus_trajectories(self, policy_version: int) -> int:
        """Return how many trajectories in flight an over-provisioned run does not need."""
        if self._batch.over_provision_ratio == 1.0:
            return 0
        counts = self._ledger.counts()
        return surplus_trajectories(
            max_policy_lag_steps=self._spec.algorithm.max_policy_lag_steps,
            policy_version=policy_version,
            batch_trajectories=self._batch.trajectories,
            accepted=counts.buffered + counts.consumed,
            in_flight=counts.in_flight,
            over_provision_ratio=self._batch.over_provision_ratio,
        )

    def _max_sequences_of(self, rollout_group: str) -> int:
        """Return how many sequences a worker generates at once; the maximum if it is unknown."""
        return self._max_sequences.get(rollout_group, max(self._max_sequences.values()))

    def _quota(
        self, worker_id: str, held: Mapping[str, int], *, budget: int, places: int, group: int
    ) -> int:
        """Return a worker's quota, see `vcpo.control.quota`."""
        own = self._registry.trust_of(worker_id)
        if own is Trust.TRUSTED:  # of a thousand workers nearly all: count the others for none
            return max(0, places - held.get(worker_id, 0))
        trust = {worker.worker_id: worker.trust for worker in self._registry.workers()}
        holders = LeaseHolders(
            budget=budget,
            num_trusted=sum(one is Trust.TRUSTED for one in trust.values()),
            num_new=sum(one is Trust.NEW for one in trust.values()),
            held_by_untrusted=sum(
                number for name, number in held.items() if trust.get(name) is not Trust.TRUSTED
            ),
        )
        return quota_trajectories(
            holders,
            own,
            places=places,
            held=held.get(worker_id, 0),
            group=group,
        )
