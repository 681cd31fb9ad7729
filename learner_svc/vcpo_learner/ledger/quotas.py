"""How much one worker may hold of this run's work, by what it holds and the registry says of it."""

from __future__ import annotations

from collections.abc import Mapping

from vcpo.control.quota import LeaseHolders, Trust, quota_trajectories
from vcpo.spec import VCPORunSpec
from vcpo_learner.ledger.evaluation import EvaluationRound
from vcpo_learner.ledger.protocol import Ledger
from vcpo_learner.ledger.worker_registry import WorkerRegistry

_SPARE_WORKERS = 64


def max_workers(spec: VCPORunSpec) -> int:
    """Workers that a learner keeps in mind: twice the run's, for those that replace others."""
    return 2 * sum(group.max_replicas for group in spec.rollouts) + _SPARE_WORKERS


class Quotas:
    """Judges what a worker may be granted. Owner: the learner's event loop."""

    def __init__(self, spec: VCPORunSpec, ledger: Ledger, registry: WorkerRegistry) -> None:
        self._batch = spec.batch
        self._samples_per_prompt = spec.evaluation.samples_per_prompt
        self._places = {group.name: group.max_concurrent_sequences for group in spec.rollouts}
        self._ledger = ledger
        self._registry = registry

    def training(self, worker_id: str, rollout_group: str, *, budget: int) -> int:
        """Training trajectories that a worker may be granted now; see `vcpo.control.quota`.

        budget: Trajectories that may be in flight in all.
        """
        group = self._batch.trajectories_per_prompt
        num_groups = self._places_of(rollout_group) // self._batch.trajectories_per_prompt
        held = self._ledger.in_flight_by_worker()
        return self._quota(worker_id, held, budget=budget, places=num_groups * group, group=group)

    def evaluation(self, worker_id: str, rollout_group: str, current: EvaluationRound) -> int:
        """Answers of a round that a worker may be asked for now, by the same rule.

        All that is unanswered may be in flight. What workers without trust may hold of it shrinks
        with it, so that a round ends whoever takes its prompts.
        """
        return self._quota(
            worker_id,
            current.in_flight_by_worker(),
            budget=current.num_unanswered,
            places=self._places_of(rollout_group),
            group=self._samples_per_prompt,
        )

    def _places_of(self, rollout_group: str) -> int:
        """Sequences that a worker can have under way; of an unknown group as of the largest."""
        return self._places.get(rollout_group, max(self._places.values()))

    def _quota(
        self, worker_id: str, held: Mapping[str, int], *, budget: int, places: int, group: int
    ) -> int:
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
            trust.get(worker_id, Trust.NEW),
            places=places,
            held=held.get(worker_id, 0),
            group=group,
        )
