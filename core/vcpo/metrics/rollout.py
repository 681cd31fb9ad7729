"""What a rollout worker exports."""

from vcpo.metrics.label_values import EnvironmentFault, SampleOutcome, WeightSource
from vcpo.metrics.registry import PartRegistry
from vcpo.wire.failures import FailureCause

_GENERATION_BUCKETS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
_SYNC_BUCKETS = (0.02, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
_ENVIRONMENT_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)


class RolloutMetrics:
    """What a rollout worker exports."""

    def __init__(self, *, run: str, group: str) -> None:
        self.registry = PartRegistry("rollout", run=run, group=group)
        self._declare_generation()
        self._declare_weights()
        self._declare_environment()

    def _declare_generation(self) -> None:
        registry = self.registry
        self.samples = registry.counter(
            "vcpo_rollout_samples_total",
            "Trajectories finished by this worker, by outcome.",
            outcome=SampleOutcome,
        )
        self.failures = registry.counter(
            "vcpo_rollout_failures_total",
            "Generations that failed on this worker, by cause, such as prompt, reward or timeout.",
            cause=FailureCause,
        )
        self.tokens = registry.counter(
            "vcpo_rollout_tokens_total", "Response tokens sampled by this worker."
        )
        self.generation_s = registry.histogram(
            "vcpo_rollout_generation_seconds",
            "Time from the grant of a lease to its last trajectory.",
            buckets=_GENERATION_BUCKETS,
        )
        self.in_flight = registry.gauge(
            "vcpo_rollout_in_flight", "Trajectories that this worker is generating."
        )
        self.lease_wait_s = registry.counter(
            "vcpo_rollout_lease_wait_seconds_total",
            "Time in which the worker had free slots and no lease.",
        )

    def _declare_weights(self) -> None:
        registry = self.registry
        self.weights_age_versions = registry.measure(
            "vcpo_rollout_weights_age_versions",
            "Policy versions between the newest that this worker heard of and the one it samples"
            " from.",
        )
        self.weight_sync_duration_s = registry.histogram(
            "vcpo_rollout_weight_sync_duration_seconds",
            "Time to fetch, verify and swap in a policy version.",
            buckets=_SYNC_BUCKETS,
        )
        self.weight_sync_bytes = registry.counter(
            "vcpo_rollout_weight_sync_bytes_total",
            "Bytes read to update weights, by source: store or server.",
            source=WeightSource,
        )
        self.device_memory_bytes = registry.gauge(
            "vcpo_rollout_device_memory_bytes",
            "Memory of the worker's fullest GPU after a swap; peak is the most that was allocated.",
            "state",
        )

    def _declare_environment(self) -> None:
        registry = self.registry
        self.environment_s = registry.histogram(
            "vcpo_rollout_environment_seconds",
            "Duration of one call to the environment: a prompt, a reply or a reward.",
            buckets=_ENVIRONMENT_BUCKETS,
        )
        self.environment_failures = registry.counter(
            "vcpo_rollout_environment_failures_total",
            "Calls to the environment that failed, by kind.",
            kind=EnvironmentFault,
        )
        self.environment_hung_calls = registry.gauge(
            "vcpo_rollout_environment_hung_calls",
            "Calls to the environment that were given up and have not returned.",
        )
