"""What vLLM says of a decoding step becomes what the metrics need."""

from __future__ import annotations

import pytest

import tests.unit.rollout.engines.vllm.tiny_vllm  # noqa: F401 - skips where vLLM is not
from vcpo_rollout.gauges import EngineStep

stats = pytest.importorskip("vllm.v1.metrics.stats")


def test_every_number_comes_from_its_field():
    from vcpo_rollout.engines.vllm.statistics import engine_step

    scheduler = stats.SchedulerStats(
        num_running_reqs=5,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.25,
        prefix_cache_stats=stats.PrefixCacheStats(requests=2, queries=300, hits=128),
    )
    iteration = stats.IterationStats()
    iteration.num_preempted_reqs = 4
    step = EngineStep(
        kv_cache_used_ratio=0.25,
        running=5,
        waiting=3,
        preemptions=4,
        prefix_cache_queries=300,
        prefix_cache_hits=128,
    )
    assert engine_step(scheduler, iteration) == step


def test_a_step_that_samples_nothing_preempts_nobody():
    from vcpo_rollout.engines.vllm.statistics import engine_step

    assert engine_step(stats.SchedulerStats(), None).preemptions == 0
