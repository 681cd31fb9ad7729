"""vLLM's own numbers, into the worker's metrics.

vLLM keeps statistics if it is given a logger for them, and hands one record to it after each
decoding step, in the worker's event loop (vLLM 0.32, `vllm.v1.metrics.loggers.StatLoggerManager`).
Beside any logger it adds `PrometheusStatLogger`, a hundred metrics under its own names in the
process-wide registry, unless the logger is one of that class. So this one is, and replaces it.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from vcpo_rollout.gauges import EngineStep, RolloutGauges


class StepLogger(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is not type-checked
    """Hands each step to the worker's gauges, once it knows them."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        """Do not initialize the base class: it would register vLLM's own metrics."""
        self.gauges: RolloutGauges | None = None

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take vLLM's records of one step; either may be missing."""
        if self.gauges is not None and scheduler_stats is not None:
            self.gauges.record_engine_step(engine_step(scheduler_stats, iteration_stats))

    def record_admission_rejection(self, reason: str) -> None:
        """Do nothing: the worker's queue has no limit."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Do nothing: the engine never sleeps."""

    def log_engine_initialized(self) -> None:
        """Do nothing: the configuration is the run's."""


def step_logger(llm: AsyncLLM) -> StepLogger:
    """Return the logger of an engine that was started with `stat_loggers=[StepLogger]`."""
    assert llm.logger_manager is not None
    return next(each for each in llm.logger_manager.stat_loggers if isinstance(each, StepLogger))


def engine_step(
    scheduler_stats: SchedulerStats, iteration_stats: IterationStats | None
) -> EngineStep:
    """Return what the metrics need of vLLM's records.

    iteration_stats: None for a step that sampled nothing.
    """
    prefix_cache = scheduler_stats.prefix_cache_stats
    return EngineStep(
        kv_cache_used_ratio=scheduler_stats.kv_cache_usage,
        running=scheduler_stats.num_running_reqs,
        waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
        preemptions=0 if iteration_stats is None else iteration_stats.num_preempted_reqs,
        prefix_cache_queries=prefix_cache.queries,
        prefix_cache_hits=prefix_cache.hits,
    )
