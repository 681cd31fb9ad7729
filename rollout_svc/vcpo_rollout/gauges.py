"""Writes the events of a worker into its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vcpo.metrics import RolloutMetrics
from vcpo.metrics.label_values import EnvironmentFault, MemoryState, WeightSource
from vcpo.wire.failures import FailureCause
from vcpo.wire.trajectory import Trajectory
from vcpo.wire.versions import age_steps


class RolloutGauges:
    """One method per event of a worker. Owner: the worker's event loop."""

    def __init__(self, metrics: RolloutMetrics) -> None:
        self._metrics = metrics
        self._newest_version = 0
        """Policy version that the worker heard of last."""
        self._version_in_use: int | None = None

    def add_weight_bytes(self, source: WeightSource, num_bytes: int) -> None:
        self._metrics.weight_sync_bytes.labels(source).inc(num_bytes)

    def record_swap(self, policy_version: int, duration_s: float) -> None:
        self._metrics.weight_sync_duration_s.observe(duration_s)
        self._version_in_use = policy_version
        self.hear_of_version(max(policy_version, self._newest_version))

    def hear_of_version(self, policy_version: int) -> None:
        self._newest_version = policy_version
        if self._version_in_use is not None:
            age = age_steps(self._version_in_use, policy_version)
            self._metrics.weights_age_versions.set(age)

    def add_lease_wait(self, duration_s: float) -> None:
        self._metrics.lease_wait_s.inc(duration_s)

    def observe_environment(self, duration_s: float) -> None:
        self._metrics.environment_s.observe(duration_s)

    def count_environment_failure(self, fault: EnvironmentFault) -> None:
        self._metrics.environment_failures.labels(fault).inc()

    def set_hung_calls(self, number: int) -> None:
        self._metrics.environment_hung_calls.set(number)

    def set_device_memory(self, size_bytes: Mapping[MemoryState, int]) -> None:
        for state, size in size_bytes.items():
            self._metrics.device_memory_bytes.labels(state).set(size)

    def set_in_flight(self, num_trajectories: int) -> None:
        self._metrics.in_flight.set(num_trajectories)

    def observe_generation(self, duration_s: float) -> None:
        self._metrics.generation_s.observe(duration_s)

    def count_submitted(self, trajectories: Sequence[Trajectory], num_accepted: int) -> None:
        self._metrics.tokens.inc(sum(one.num_sampled_tokens for one in trajectories))
        self._metrics.samples.labels("accepted").inc(num_accepted)
        self._metrics.samples.labels("lease_ended").inc(len(trajectories) - num_accepted)

    def count_expired(self, num_trajectories: int) -> None:
        self._metrics.samples.labels("lease_ended").inc(num_trajectories)

    def count_released(self, num_trajectories: int) -> None:
        self._metrics.samples.labels("released").inc(num_trajectories)

    def count_failed(self, num_trajectories: int, cause: FailureCause) -> None:
        outcome = "environment_failed" if cause.is_of_environment else "engine_failed"
        self._metrics.samples.labels(outcome).inc(num_trajectories)
        self._metrics.failures.labels(cause).inc()
