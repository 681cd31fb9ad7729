"""The worker's metrics, in the words of what happens to it."""

from __future__ import annotations

from collections.abc import Sequence

from vcpo.metrics import RolloutMetrics
from vcpo.wire.failures import FailureCause
from vcpo.wire.trajectory import PartialResponse, Trajectory
from vcpo_rollout.sandbox.runner import PROTECTIONS, num_folders_left


class RolloutGauges:
    """Writes what happens into the worker's metrics. Owner: the worker's event loop."""

    def __init__(self, metrics: RolloutMetrics) -> None:
        self._metrics = metrics

    def weights_fetched(self, source: str, num_bytes: int) -> None:
        """Note bytes of full sets or deltas from a `source`: `learner`, `peer` or `archive`."""
        self._metrics.weight_sync_bytes.labels(source).inc(num_bytes)

    def peer_avoided(self, reason: str) -> None:
        """Note a peer that is not asked for a time; it was `slow`, `failed` or `corrupt`."""
        self._metrics.peers_avoided.labels(reason).inc()

    def weights_in_use(self, policy_version: int, duration_s: float) -> None:
        """Note a version fetched, checked and swapped in."""
        self._metrics.weights_version.set(policy_version)
        self._metrics.weight_sync_duration_s.observe(duration_s)

    def weights_updated_in_flight(self) -> None:
        """Note that sequences under way went on with new weights."""
        self._metrics.weight_updates_in_flight.inc()

    def sandboxed(self, unprotected: Sequence[str]) -> None:
        """Note that programs of the model's run here, and what they are not kept from."""
        for protection in PROTECTIONS:
            missing = float(protection in unprotected)
            self._metrics.sandbox_missing.labels(protection.replace(" ", "_")).set(missing)
        self._metrics.sandbox_folders_left.set_function(num_folders_left)

    def lease_waited(self, duration_s: float) -> None:
        """Note time with free places and no lease."""
        self._metrics.lease_wait_s.inc(duration_s)

    def in_flight(self, num_trajectories: int) -> None:
        """Note how much is under way."""
        self._metrics.in_flight.set(num_trajectories)

    def generated(self, duration_s: float) -> None:
        """Note how long a prompt's answers took."""
        self._metrics.generation_s.observe(duration_s)

    def submitted(self, trajectories: Sequence[Trajectory], num_taken: int) -> None:
        """Note a submission, of which the learner took `num_taken` trajectories."""
        self._metrics.tokens.inc(sum(one.num_sampled_tokens for one in trajectories))
        self._metrics.samples.labels("accepted").inc(num_taken)
        self._metrics.samples.labels("lease_ended").inc(len(trajectories) - num_taken)

    def expired(self, num_trajectories: int) -> None:
        """Note a lease that ended before its prompt was answered."""
        self._metrics.samples.labels("lease_ended").inc(num_trajectories)

    def handed_back(self, num_trajectories: int, begun: Sequence[PartialResponse]) -> None:
        """Note a prompt that was cut and handed back with what was begun."""
        self._metrics.samples.labels("handed_back").inc(num_trajectories)
        self._metrics.tokens_released.inc(_num_tokens(begun))

    def resumed(self, begun: Sequence[PartialResponse]) -> None:
        """Note answers that came with a lease and are gone on with."""
        self._metrics.tokens_resumed.inc(_num_tokens(begun))

    def begun_anew(self) -> None:
        """Note an answer begun elsewhere that could not be gone on with."""
        self._metrics.restarted.inc()

    def failed(self, num_trajectories: int, cause: FailureCause) -> None:
        """Note a prompt that could not be answered."""
        outcome = "environment_failed" if cause.is_of_environment else "engine_failed"
        self._metrics.samples.labels(outcome).inc(num_trajectories)
        self._metrics.failures.labels(cause).inc()


def _num_tokens(begun: Sequence[PartialResponse]) -> int:
    return sum(one.num_sampled_tokens for one in begun)
