"""The Prometheus metrics of a worker, and what it counts by more than one of them."""

from collections.abc import Mapping, Sequence

from vcpo.metrics import RolloutMetrics
from vcpo.metrics.label_values import MemoryState
from vcpo.wire.failures import FailureCause
from vcpo.wire.trajectory import Trajectory
from vcpo.wire.versions import age_steps


class RolloutGauges:
    """The metrics, and what a worker counts by more than one. Owner: its event loop."""

    def __init__(self, metrics: RolloutMetrics) -> None:
        self.metrics = metrics
        self._newest_version = 0
        """Policy version that the worker heard of last."""
        self._version_in_use: int | None = None

    def record_swap(self, policy_version: int, duration_s: float) -> None:
        self.metrics.weight_sync_duration_s.observe(duration_s)
        self._version_in_use = policy_version
        self.hear_of_version(max(policy_version, self._newest_version))

    def hear_of_version(self, policy_version: int) -> None:
        self._newest_version = policy_version
        if self._version_in_use is not None:
            age = age_steps(self._version_in_use, policy_version)
            self.metrics.weights_age_versions.set(age)

    def set_device_memory(self, size_bytes: Mapping[MemoryState, int]) -> None:
        for state, size in size_bytes.items():
            self.metrics.device_memory_bytes.labels(state).set(size)

    def count_submitted(self, trajectories: Sequence[Trajectory], num_accepted: int) -> None:
        self.metrics.tokens.inc(sum(one.num_sampled_tokens for one in trajectories))
        self.metrics.samples.labels("accepted").inc(num_accepted)
        self.metrics.samples.labels("lease_ended").inc(len(trajectories) - num_accepted)

    def count_failed(self, num_trajectories: int, cause: FailureCause) -> None:
        outcome = "environment_failed" if cause.is_of_environment else "engine_failed"
        self.metrics.samples.labels(outcome).inc(num_trajectories)
        self.metrics.failures.labels(cause).inc()
