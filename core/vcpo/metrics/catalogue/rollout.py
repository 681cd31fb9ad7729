"""What a rollout worker exports."""

from __future__ import annotations

from vcpo.metrics.label_values import (
    EnvironmentFault,
    MemoryState,
    SampleOutcome,
    WeightSource,
)
from vcpo.metrics.metric import Feature, Label, counter, declared_metrics, gauge, histogram, measure
from vcpo.metrics.registry import Instruments, PartRegistry
from vcpo.records.step_chart import Unit
from vcpo.wire.failures import FailureCause

_GENERATION_BUCKETS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
_SYNC_BUCKETS = (0.02, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
_ENVIRONMENT_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)


class EngineMetrics(Instruments):
    """What a rollout worker exports of its engine, where the engine has such numbers."""

    kv_cache_used_ratio = gauge(
        "vcpo_rollout_engine_kv_cache_used_ratio",
        "Share of the engine's cache of keys and values that is in use.",
        appears_with=Feature.VLLM,
    )
    preemptions = counter(
        "vcpo_rollout_engine_preemptions_total",
        "Sequences that the engine stopped because its cache was full, and computed again.",
        appears_with=Feature.VLLM,
    )
    waiting = gauge(
        "vcpo_rollout_engine_waiting",
        "Sequences that wait for a place in the engine.",
        appears_with=Feature.VLLM,
    )
    running = gauge(
        "vcpo_rollout_engine_running",
        "Sequences that the engine is generating.",
        appears_with=Feature.VLLM,
    )
    prefix_cache_queries = counter(
        "vcpo_rollout_engine_prefix_cache_queries_total",
        "Prompt tokens that the engine looked up in its prefix cache.",
        appears_with=Feature.VLLM,
    )
    prefix_cache_hits = counter(
        "vcpo_rollout_engine_prefix_cache_hits_total",
        "Prompt tokens that the engine found in its prefix cache.",
        appears_with=Feature.VLLM,
    )


class RolloutMetrics(Instruments):
    """What a rollout worker exports."""

    samples = counter(
        "vcpo_rollout_samples_total",
        "Trajectories finished by this worker, by outcome.",
        Label("outcome", tuple(SampleOutcome)),
    )
    failures = counter(
        "vcpo_rollout_failures_total",
        "Generations that failed on this worker, by cause, such as prompt, reward or timeout.",
        Label("cause", tuple(FailureCause)),
    )
    tokens = counter("vcpo_rollout_tokens_total", "Response tokens sampled by this worker.")
    restarted = counter(
        "vcpo_rollout_restarted_total",
        "Multi-turn responses restarted because the environment did not repeat its earlier turns.",
    )
    truncated = counter(
        "vcpo_rollout_truncated_total",
        "Prompts that lost text because they did not fit into the model's context.",
    )
    tokens_released = counter(
        "vcpo_rollout_tokens_released_total",
        "Tokens of partial responses that this worker released for another lease to resume.",
    )
    tokens_resumed = counter(
        "vcpo_rollout_tokens_resumed_total",
        "Tokens of partial responses that came with a lease and were resumed by this worker.",
    )
    generation_s = histogram(
        "vcpo_rollout_generation_seconds",
        "Time from the grant of a lease to its last trajectory.",
        _GENERATION_BUCKETS,
    )
    in_flight = gauge(
        "vcpo_rollout_in_flight",
        "Trajectories that this worker is generating.",
        unit=Unit.TRAJECTORIES,
    )
    weights_version = measure(
        "vcpo_rollout_weights_version",
        "Policy version that this worker samples from.",
        not_shown="boards show vcpo_rollout_weights_age_versions, which needs no subtraction",
    )
    weights_age_versions = measure(
        "vcpo_rollout_weights_age_versions",
        "Policy versions between the newest that this worker heard of and the one it samples from.",
    )
    weight_sync_duration_s = histogram(
        "vcpo_rollout_weight_sync_duration_seconds",
        "Time to fetch, verify and swap in a policy version.",
        _SYNC_BUCKETS,
    )
    weight_sync_bytes = counter(
        "vcpo_rollout_weight_sync_bytes_total",
        "Bytes read to update weights, by source: store or server.",
        Label("source", tuple(WeightSource)),
    )
    weight_updates_in_flight = counter(
        "vcpo_rollout_weight_updates_in_flight_total",
        "Policy versions swapped in while sequences were being generated.",
    )
    environment_s = histogram(
        "vcpo_rollout_environment_seconds",
        "Duration of one call to the environment: a prompt, a reply or a reward.",
        _ENVIRONMENT_BUCKETS,
    )
    environment_failures = counter(
        "vcpo_rollout_environment_failures_total",
        "Calls to the environment that failed, by kind.",
        Label("kind", tuple(EnvironmentFault)),
    )
    environment_hung_calls = gauge(
        "vcpo_rollout_environment_hung_calls",
        "Calls to the environment that were given up and have not returned.",
    )
    device_memory_bytes = gauge(
        "vcpo_rollout_device_memory_bytes",
        "Memory of the worker's fullest GPU after a swap; peak is the most that was allocated.",
        Label("state", tuple(MemoryState)),
        appears_with=Feature.GPU,
    )
    lease_wait_s = counter(
        "vcpo_rollout_lease_wait_seconds_total",
        "Time in which the worker had free slots and no lease.",
    )

    def __init__(self, *, run: str, group: str) -> None:
        self._part = PartRegistry("rollout", {"run": run, "group": group})
        super().__init__(self._part)

    def engine(self) -> EngineMetrics:
        """Export the engine's numbers too; called once, for an engine that has them."""
        return EngineMetrics(self._part)


ROLLOUT, ROLLOUT_ENGINE = declared_metrics(RolloutMetrics), declared_metrics(EngineMetrics)
"""Metrics of every rollout worker, besides those of every part, and of a worker's engine."""
