"""How much one worker may hold of this run's work, by what the ledger and the roster say."""

from __future__ import annotations

from vcpo.control.quota import Fleet, Trust, quota_trajectories
from vcpo.spec import VCPORunSpec
from vcpo_learner.ledger import Ledger
from vcpo_learner.roster import Roster

_SPARE_WORKERS = 64


def max_workers(spec: VCPORunSpec) -> int:
    """Workers that a learner keeps in mind: twice the run's, for those that replace others."""
    return 2 * sum(group.max_replicas for group in spec.rollouts) + _SPARE_WORKERS


class Quotas:
    """Judges what a worker may be granted. Owner: the learner's event loop."""

    def __init__(self, spec: VCPORunSpec, ledger: Ledger, roster: Roster) -> None:
        self._batch = spec.batch
        self._places = {group.name: group.max_concurrent_sequences for group in spec.rollouts}
        self._ledger = ledger
        self._roster = roster

    def places(self, rollout_group: str) -> int:
        """Sequences that a worker can have under way; of an unknown group as of the largest."""
        return self._places.get(rollout_group, max(self._places.values()))

    def trajectories(self, worker_id: str, rollout_group: str, *, budget: int) -> int:
        """Training trajectories that a worker may be granted now; see `vcpo.control.quota`.

        budget: Trajectories that may be in flight in all.
        """
        trust = {worker.worker_id: worker.trust for worker in self._roster.workers()}
        held = self._ledger.in_flight_by_worker()
        fleet = Fleet(
            budget=budget,
            num_trusted=sum(one is Trust.TRUSTED for one in trust.values()),
            num_new=sum(one is Trust.NEW for one in trust.values()),
            held_by_untrusted=sum(
                number for name, number in held.items() if trust.get(name) is not Trust.TRUSTED
            ),
        )
        group = self._batch.trajectories_per_prompt
        return quota_trajectories(
            fleet,
            trust.get(worker_id, Trust.NEW),
            places=self.places(rollout_group) // self._batch.sequences_per_prompt * group,
            held=held.get(worker_id, 0),
            group=group,
        )
