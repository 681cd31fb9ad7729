"""Writes the events of a worker into its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Sequence

from vcpo.metrics import RolloutMetrics
from vcpo.wire.failures import FailureCause
from vcpo.wire.trajectory import PartialResponse, Trajectory
from vcpo_rollout.sandbox.runner import PROTECTIONS, num_folders_left


class RolloutGauges:
    """One method per event of a worker. Owner: the worker's event loop."""

    def __init__(self, metrics: RolloutMetrics) -> None:
        self._metrics = metrics

    def add_weight_bytes(self, source: str, num_bytes: int) -> None:
        """Count received bytes of full sets and deltas; source: `learner`, `peer` or `archive`."""
        self._metrics.weight_sync_bytes.labels(source).inc(num_bytes)

    def count_avoided_peer(self, reason: str) -> None:
        """Count a peer that the worker avoids for a time; reason: `slow`, `failed`, `corrupt`."""
        self._metrics.peers_avoided.labels(reason).inc()

    def record_swap(self, policy_version: int, duration_s: float) -> None:
        """Record a version that was fetched, checked and swapped in, and how long that took."""
        self._metrics.weights_version.set(policy_version)
        self._metrics.weight_sync_duration_s.observe(duration_s)

    def count_in_flight_update(self) -> None:
        """Count a swap of weights after which running sequences continued."""
        self._metrics.weight_updates_in_flight.inc()

    def watch_sandbox(self, unprotected: Sequence[str]) -> None:
        """Report the sandbox of a worker that runs programs of the model.

        unprotected: the protections that this system does not provide, of `PROTECTIONS`.
        """
        for protection in PROTECTIONS:
            missing = float(protection in unprotected)
            self._metrics.sandbox_missing.labels(protection.replace(" ", "_")).set(missing)
        self._metrics.sandbox_folders_left.set_function(num_folders_left)

    def add_lease_wait(self, duration_s: float) -> None:
        """Add time in which the worker had free slots and no lease."""
        self._metrics.lease_wait_s.inc(duration_s)

    def set_in_flight(self, num_trajectories: int) -> None:
        """Set the number of trajectories that are being generated or judged."""
        self._metrics.in_flight.set(num_trajectories)

    def observe_generation(self, duration_s: float) -> None:
        """Observe how long the responses to one prompt took."""
        self._metrics.generation_s.observe(duration_s)

    def count_submitted(self, trajectories: Sequence[Trajectory], num_accepted: int) -> None:
        """Count submitted trajectories, of which the learner accepted `num_accepted`."""
        self._metrics.tokens.inc(sum(one.num_sampled_tokens for one in trajectories))
        self._metrics.samples.labels("accepted").inc(num_accepted)
        self._metrics.samples.labels("lease_ended").inc(len(trajectories) - num_accepted)

    def count_expired(self, num_trajectories: int) -> None:
        """Count the trajectories of a lease that expired before they were submitted."""
        self._metrics.samples.labels("lease_ended").inc(num_trajectories)

    def count_released(
        self, num_trajectories: int, partial_responses: Sequence[PartialResponse]
    ) -> None:
        """Count the trajectories of a released lease, and the tokens released with it."""
        self._metrics.samples.labels("released").inc(num_trajectories)
        self._metrics.tokens_released.inc(_num_tokens(partial_responses))

    def count_resumed(self, partial_responses: Sequence[PartialResponse]) -> None:
        """Count the tokens of partial responses that this worker resumes."""
        self._metrics.tokens_resumed.inc(_num_tokens(partial_responses))

    def count_restarted(self) -> None:
        """Count a partial response that the worker could not resume and restarted."""
        self._metrics.restarted.inc()

    def count_failed(self, num_trajectories: int, cause: FailureCause) -> None:
        """Count the trajectories of a prompt that failed."""
        outcome = "environment_failed" if cause.is_of_environment else "engine_failed"
        self._metrics.samples.labels(outcome).inc(num_trajectories)
        self._metrics.failures.labels(cause).inc()


def _num_tokens(partial_responses: Sequence[PartialResponse]) -> int:
    return sum(one.num_sampled_tokens for one in partial_responses)
