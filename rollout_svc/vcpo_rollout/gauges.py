"""Writes the events of a worker into its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vcpo.metrics import RolloutMetrics
from vcpo.metrics.catalogue.rollout import EngineMetrics
from vcpo.metrics.label_values import EnvironmentFault, MemoryState, WeightSource
from vcpo.wire.failures import FailureCause
from vcpo.wire.trajectory import PartialResponse, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """What one decoding step of an engine did, and the state that it left."""

    kv_cache_used_ratio: float
    """Share of the cache of keys and values that is in use, in [0, 1]."""
    running: int
    """Sequences that are being generated."""
    waiting: int
    """Sequences that wait for a place."""
    preemptions: int
    """Sequences that this step stopped because the cache was full."""
    prefix_cache_queries: int
    """Prompt tokens that this step looked up in the prefix cache."""
    prefix_cache_hits: int
    """Prompt tokens that were found in the prefix cache."""


class RolloutGauges:
    """One method per event of a worker. Owner: the worker's event loop."""

    def __init__(self, metrics: RolloutMetrics) -> None:
        self._metrics = metrics
        self._engine: EngineMetrics | None = None
        self._newest_version = 0
        """Policy version that the worker heard of last."""
        self._version_in_use: int | None = None

    def add_weight_bytes(self, source: WeightSource, num_bytes: int) -> None:
        """Count bytes of full sets and deltas that were read."""
        self._metrics.weight_sync_bytes.labels(source).inc(num_bytes)

    def record_swap(self, policy_version: int, duration_s: float) -> None:
        """Record a version that was fetched, checked and swapped in, and how long that took."""
        self._metrics.weights_version.set(policy_version)
        self._metrics.weight_sync_duration_s.observe(duration_s)
        self._version_in_use = policy_version
        self.hear_of_version(max(policy_version, self._newest_version))

    def hear_of_version(self, policy_version: int) -> None:
        """Record the newest version of the learner, as a manifest or a lease names it.

        It may be smaller than the one before: a learner that resumes goes back.
        """
        self._newest_version = policy_version
        if self._version_in_use is not None:
            age = max(0, policy_version - self._version_in_use)
            self._metrics.weights_age_versions.set(age)

    def count_in_flight_update(self) -> None:
        """Count a swap of weights after which running sequences continued."""
        self._metrics.weight_updates_in_flight.inc()

    def add_lease_wait(self, duration_s: float) -> None:
        """Add time in which the worker had free slots and no lease."""
        self._metrics.lease_wait_s.inc(duration_s)

    def observe_environment(self, duration_s: float) -> None:
        """Observe how long a call to the environment took, the wait for a thread included."""
        self._metrics.environment_s.observe(duration_s)

    def count_environment_failure(self, fault: EnvironmentFault) -> None:
        """Count a call to the environment that failed."""
        self._metrics.environment_failures.labels(fault).inc()

    def set_hung_calls(self, number: int) -> None:
        """Set the number of calls to the environment that have not returned in time."""
        self._metrics.environment_hung_calls.set(number)

    def watch_engine(self) -> None:
        """Export the metrics of an engine that knows what its steps do."""
        self._engine = self._metrics.engine()

    def record_engine_step(self, step: EngineStep) -> None:
        """Record a decoding step of an engine that is watched."""
        assert self._engine is not None
        engine = self._engine
        engine.kv_cache_used_ratio.set(step.kv_cache_used_ratio)
        engine.running.set(step.running)
        engine.waiting.set(step.waiting)
        engine.preemptions.inc(step.preemptions)
        engine.prefix_cache_queries.inc(step.prefix_cache_queries)
        engine.prefix_cache_hits.inc(step.prefix_cache_hits)

    def set_device_memory(self, size_bytes: Mapping[MemoryState, int]) -> None:
        """Set the memory of the engine's GPU; of several it is that of the fullest one."""
        for state, size in size_bytes.items():
            self._metrics.device_memory_bytes.labels(state).set(size)

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

    def count_truncated(self) -> None:
        """Count a prompt that lost text because it did not fit into the context."""
        self._metrics.truncated.inc()

    def count_failed(self, num_trajectories: int, cause: FailureCause) -> None:
        """Count the trajectories of a prompt that failed."""
        outcome = "environment_failed" if cause.is_of_environment else "engine_failed"
        self._metrics.samples.labels(outcome).inc(num_trajectories)
        self._metrics.failures.labels(cause).inc()


def _num_tokens(partial_responses: Sequence[PartialResponse]) -> int:
    return sum(one.num_sampled_tokens for one in partial_responses)
