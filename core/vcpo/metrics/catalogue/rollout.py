"""What a rollout worker exports."""

from __future__ import annotations

from vcpo.metrics.catalogue.declare import counter, gauge, histogram, measure
from vcpo.metrics.label_values import (
    EnvironmentFault,
    SampleOutcome,
    WeightSource,
)
from vcpo.metrics.metric import Feature, Label
from vcpo.records.step_chart import Unit
from vcpo.wire.failures import FailureCause

_GENERATION_BUCKETS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
_SYNC_BUCKETS = (0.02, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
_ENVIRONMENT_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)

SAMPLES = counter(
    "vcpo_rollout_samples_total",
    "Trajectories finished by this worker, by outcome.",
    Label("outcome", tuple(SampleOutcome)),
)
FAILURES = counter(
    "vcpo_rollout_failures_total",
    "Generations that failed on this worker, by cause, such as prompt, reward or timeout.",
    Label("cause", tuple(FailureCause)),
)
TOKENS = counter("vcpo_rollout_tokens_total", "Response tokens sampled by this worker.")
RESTARTED = counter(
    "vcpo_rollout_restarted_total",
    "Multi-turn responses restarted because the environment did not repeat its earlier turns.",
)
TRUNCATED = counter(
    "vcpo_rollout_truncated_total",
    "Prompts that lost text because they did not fit into the model's context.",
)
TOKENS_RELEASED = counter(
    "vcpo_rollout_tokens_released_total",
    "Tokens of partial responses that this worker released for another lease to resume.",
)
TOKENS_RESUMED = counter(
    "vcpo_rollout_tokens_resumed_total",
    "Tokens of partial responses that came with a lease and were resumed by this worker.",
)
GENERATION = histogram(
    "vcpo_rollout_generation_seconds",
    "Time from the grant of a lease to its last trajectory.",
    _GENERATION_BUCKETS,
)
IN_FLIGHT = gauge(
    "vcpo_rollout_in_flight",
    "Trajectories that this worker is generating.",
    unit=Unit.TRAJECTORIES,
)
WEIGHTS_VERSION = measure(
    "vcpo_rollout_weights_version",
    "Policy version that this worker samples from.",
    not_shown="boards show vcpo_rollout_weights_age_versions, which needs no subtraction",
)
WEIGHTS_AGE = measure(
    "vcpo_rollout_weights_age_versions",
    "Policy versions between the newest that this worker heard of and the one it samples from.",
)
WEIGHT_SYNC_DURATION = histogram(
    "vcpo_rollout_weight_sync_duration_seconds",
    "Time to fetch, verify and swap in a policy version.",
    _SYNC_BUCKETS,
)
WEIGHT_SYNC_BYTES = counter(
    "vcpo_rollout_weight_sync_bytes_total",
    "Bytes read to update weights, by source: store or server.",
    Label("source", tuple(WeightSource)),
)
WEIGHT_UPDATES_IN_FLIGHT = counter(
    "vcpo_rollout_weight_updates_in_flight_total",
    "Policy versions swapped in while sequences were being generated.",
)
ENVIRONMENT_DURATION = histogram(
    "vcpo_rollout_environment_seconds",
    "Duration of one call to the environment: a prompt, a reply or a reward.",
    _ENVIRONMENT_BUCKETS,
)
ENVIRONMENT_FAILURES = counter(
    "vcpo_rollout_environment_failures_total",
    "Calls to the environment that failed, by kind.",
    Label("kind", tuple(EnvironmentFault)),
)
ENVIRONMENT_HUNG_CALLS = gauge(
    "vcpo_rollout_environment_hung_calls",
    "Calls to the environment that were given up and have not returned.",
)
LEASE_WAIT = counter(
    "vcpo_rollout_lease_wait_seconds_total", "Time in which the worker had free slots and no lease."
)

ENGINE_KV_CACHE = gauge(
    "vcpo_rollout_engine_kv_cache_used_ratio",
    "Share of the engine's cache of keys and values that is in use.",
    appears_with=Feature.VLLM,
)
ENGINE_PREEMPTIONS = counter(
    "vcpo_rollout_engine_preemptions_total",
    "Sequences that the engine stopped because its cache was full, and computed again.",
    appears_with=Feature.VLLM,
)
ENGINE_WAITING = gauge(
    "vcpo_rollout_engine_waiting",
    "Sequences that wait for a place in the engine.",
    appears_with=Feature.VLLM,
)
ENGINE_RUNNING = gauge(
    "vcpo_rollout_engine_running",
    "Sequences that the engine is generating.",
    appears_with=Feature.VLLM,
)
ENGINE_PREFIX_CACHE_QUERIES = counter(
    "vcpo_rollout_engine_prefix_cache_queries_total",
    "Prompt tokens that the engine looked up in its prefix cache.",
    appears_with=Feature.VLLM,
)
ENGINE_PREFIX_CACHE_HITS = counter(
    "vcpo_rollout_engine_prefix_cache_hits_total",
    "Prompt tokens that the engine found in its prefix cache.",
    appears_with=Feature.VLLM,
)

ROLLOUT = (
    SAMPLES,
    FAILURES,
    TOKENS,
    RESTARTED,
    TRUNCATED,
    TOKENS_RELEASED,
    TOKENS_RESUMED,
    GENERATION,
    IN_FLIGHT,
    WEIGHTS_VERSION,
    WEIGHTS_AGE,
    WEIGHT_SYNC_DURATION,
    WEIGHT_SYNC_BYTES,
    WEIGHT_UPDATES_IN_FLIGHT,
    ENVIRONMENT_DURATION,
    ENVIRONMENT_FAILURES,
    ENVIRONMENT_HUNG_CALLS,
    LEASE_WAIT,
)
"""Metrics of every rollout worker, besides `every_part`."""

ROLLOUT_ENGINE = (
    ENGINE_KV_CACHE,
    ENGINE_PREEMPTIONS,
    ENGINE_WAITING,
    ENGINE_RUNNING,
    ENGINE_PREFIX_CACHE_QUERIES,
    ENGINE_PREFIX_CACHE_HITS,
)
"""Metrics of a worker's engine, where the engine has such numbers."""
