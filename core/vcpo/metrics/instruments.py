"""The instruments of each part, ready to be set: `metrics.idle_ratio.set(0.4)`.

Attributes are objects of prometheus_client, or a `BatchHistogram`. A metric with labels needs their
values first: `metrics.dropped.labels("stale").inc()`. A counter is exported from the start, at 0,
if it has no label or only labels with closed sets of values; a gauge of a measured number once it
is set.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from vcpo.metrics.catalogue import STEP_GAUGES, every_part, host, learner, operator, rollout
from vcpo.metrics.label_values import SignalResult, SignalSource
from vcpo.metrics.metric import MetricKind, label_values
from vcpo.metrics.registry import PartRegistry
from vcpo.wire.call_meter import CallMeter


class LearnerMetrics:
    """What a learner exports; `catalogue.LEARNER`.

    lag_edges, response_token_edges: bucket edges for this run's spec (`catalogue.edges`); those of
    the default spec if not given.
    """

    def __init__(
        self,
        *,
        run: str,
        lag_edges: Sequence[float] = learner.POLICY_LAG.buckets,
        response_token_edges: Sequence[float] = learner.RESPONSE_TOKENS.buckets,
    ) -> None:
        part = PartRegistry("learner", {"run": run})
        self.registry: CollectorRegistry = part.exported
        # Exported first and set last: a scrape beside a step then never has the new step with old
        # numbers, by which the operator would judge it.
        self.step = part.gauge(learner.STEP)
        self.step_timestamp_s = part.gauge(learner.STEP_TIMESTAMP)
        self.steps = part.counter(learner.STEPS)
        self.skipped_steps = part.counter(learner.SKIPPED_STEPS)
        self.skipped_steps_in_a_row = part.gauge(learner.SKIPPED_STEPS_IN_A_ROW)
        self.restored_step = part.gauge(learner.RESTORED_STEP)
        self.step_duration_s = part.histogram(learner.STEP_DURATION)
        self.stage_s = part.counter(learner.STAGE_SECONDS)
        self.tokens = part.counter(learner.TOKENS)
        self.idle_ratio = part.gauge(learner.IDLE)
        self.phase = part.gauge(learner.PHASE)
        self.checkpoint_timestamp_s = part.gauge(learner.CHECKPOINT_TIMESTAMP)
        self.disk_full = part.counter(learner.DISK_FULL)
        self.lost_changes = part.gauge(learner.LOST_CHANGES)
        self.device_memory_bytes = part.gauge(learner.DEVICE_MEMORY)
        self.last_step = {name: part.gauge(metric) for name, metric in STEP_GAUGES.items()}
        """Numbers of the last step, by the name of the metric."""
        self.ess_ratio_mean = part.gauge(learner.ESS_MEAN)
        self.ess_ratio_low = part.gauge(learner.ESS_LOW)
        self.lag_ess_ratio = part.gauge(learner.LAG_ESS)
        self.mismatch_by_engine = part.gauge(learner.MISMATCH_BY_ENGINE)
        self.mismatch_by_position = part.gauge(learner.MISMATCH_BY_POSITION)
        self.log_importance_weight = part.batch_histogram(learner.LOG_IMPORTANCE_WEIGHT)
        self.reward = part.batch_histogram(learner.REWARD)
        self.response_tokens = part.batch_histogram(learner.RESPONSE_TOKENS, response_token_edges)
        self.groups = part.counter(learner.GROUPS)
        self.responses = part.counter(learner.RESPONSES)
        self.policy_lag_steps = part.batch_histogram(learner.POLICY_LAG, lag_edges)
        self.token_lag_median_steps = part.gauge(learner.TOKEN_LAG_MEDIAN)
        self.token_lag_max_steps = part.gauge(learner.TOKEN_LAG_MAX)
        self.policy_version = part.gauge(learner.POLICY_VERSION)
        self.lag_limit_steps = part.gauge(learner.LAG_LIMIT)
        self.batch_trajectories = part.gauge(learner.BATCH_TRAJECTORIES)
        self.leased = part.counter(learner.TRAJECTORIES_LEASED)
        self.consumed = part.counter(learner.TRAJECTORIES_CONSUMED)
        self.wasted_tokens = part.counter(learner.TOKENS_WASTED)
        self.dropped = part.counter(learner.TRAJECTORIES_DROPPED)
        self.in_flight = part.gauge(learner.TRAJECTORIES_IN_FLIGHT)
        self.buffered = part.gauge(learner.TRAJECTORIES_BUFFERED)
        self.accounting_errors = part.counter(learner.ACCOUNTING_ERRORS)
        self.failures_in_a_row = part.gauge(learner.FAILURES_IN_A_ROW)
        self.workers = part.gauge(learner.WORKERS)
        self.workers_by_trust = part.gauge(learner.WORKERS_BY_TRUST)
        self.workers_set_aside = part.counter(learner.WORKERS_SET_ASIDE)
        self.calls_refused = part.counter(learner.CALLS_REFUSED)
        self.weights_served_bytes = part.counter(learner.WEIGHTS_SERVED)
        self.evaluation_accuracy = part.gauge(learner.EVALUATION_ACCURACY)
        self.evaluation_timestamp_s = part.gauge(learner.EVALUATION_TIMESTAMP)
        self.sink_dropped = part.counter(learner.SINK_DROPPED)
        self.calls = _call_meter(part)


class EngineMetrics:
    """What a rollout worker exports of its engine; `catalogue.ROLLOUT_ENGINE`."""

    def __init__(self, part: PartRegistry) -> None:
        self.kv_cache_used_ratio = part.gauge(rollout.ENGINE_KV_CACHE)
        self.preemptions = part.counter(rollout.ENGINE_PREEMPTIONS)
        self.waiting = part.gauge(rollout.ENGINE_WAITING)
        self.running = part.gauge(rollout.ENGINE_RUNNING)
        self.prefix_cache_queries = part.counter(rollout.ENGINE_PREFIX_CACHE_QUERIES)
        self.prefix_cache_hits = part.counter(rollout.ENGINE_PREFIX_CACHE_HITS)


class RolloutMetrics:
    """What a rollout worker exports; `catalogue.ROLLOUT`."""

    def __init__(self, *, run: str, group: str) -> None:
        part = PartRegistry("rollout", {"run": run, "group": group})
        self._part = part
        self.registry: CollectorRegistry = part.exported
        self.samples = part.counter(rollout.SAMPLES)
        self.failures = part.counter(rollout.FAILURES)
        self.tokens = part.counter(rollout.TOKENS)
        self.restarted = part.counter(rollout.RESTARTED)
        self.truncated = part.counter(rollout.TRUNCATED)
        self.tokens_released = part.counter(rollout.TOKENS_RELEASED)
        self.tokens_resumed = part.counter(rollout.TOKENS_RESUMED)
        self.generation_s = part.histogram(rollout.GENERATION)
        self.in_flight = part.gauge(rollout.IN_FLIGHT)
        self.weights_version = part.gauge(rollout.WEIGHTS_VERSION)
        self.weights_age_versions = part.gauge(rollout.WEIGHTS_AGE)
        self.weight_sync_duration_s = part.histogram(rollout.WEIGHT_SYNC_DURATION)
        self.weight_sync_bytes = part.counter(rollout.WEIGHT_SYNC_BYTES)
        self.weight_updates_in_flight = part.counter(rollout.WEIGHT_UPDATES_IN_FLIGHT)
        self.environment_s = part.histogram(rollout.ENVIRONMENT_DURATION)
        self.environment_failures = part.counter(rollout.ENVIRONMENT_FAILURES)
        self.environment_hung_calls = part.gauge(rollout.ENVIRONMENT_HUNG_CALLS)
        self.lease_wait_s = part.counter(rollout.LEASE_WAIT)

    def engine(self) -> EngineMetrics:
        """Export the engine's numbers too; called once, for an engine that has them."""
        return EngineMetrics(self._part)


class HostMetrics:
    """What a host exports for all of its runs; `catalogue.HOST`."""

    def __init__(self, part: PartRegistry | None = None) -> None:
        part = part or PartRegistry("host", {})
        self.registry: CollectorRegistry = part.exported
        self.gauges = {
            metric: part.gauge(metric) for metric in host.HOST if metric.kind is MetricKind.GAUGE
        }
        """Gauges of runs, by their declaration; `hosted_runs` sets them."""
        self.throttles = part.counter(host.RUN_THROTTLES)
        self.throttle_orders = part.counter(host.RUN_THROTTLE_ORDERS)
        self.decisions = part.counter(host.RUN_DECISIONS)
        self.failures = part.counter(host.RUN_FAILURES)
        self.learner_restarts = part.counter(host.RUN_LEARNER_RESTARTS)
        self.signal_requests = part.counter(host.RUN_SIGNAL_REQUESTS)
        self._counters = {
            host.RUN_THROTTLES: self.throttles,
            host.RUN_THROTTLE_ORDERS: self.throttle_orders,
            host.RUN_DECISIONS: self.decisions,
            host.RUN_FAILURES: self.failures,
            host.RUN_LEARNER_RESTARTS: self.learner_restarts,
            host.RUN_SIGNAL_REQUESTS: self.signal_requests,
        }

    def count_from_zero(self, namespace: str, run: str, *, source: SignalSource) -> None:
        """Export the counters of a run at 0, so that `increase()` sees their first event.

        A counter that counts already keeps its value. Process failures are left out, since only
        the local host counts them.
        source: the only one that this host asks for signals.
        """
        for metric in (host.RUN_THROTTLES, host.RUN_THROTTLE_ORDERS, host.RUN_LEARNER_RESTARTS):
            for values in label_values(metric.labels[len(host.HOST_LABELS) :]):
                self._counters[metric].labels(namespace, run, *values)
        for result in SignalResult:
            self.signal_requests.labels(namespace, run, source, result)

    def forget(self, namespace: str, run: str) -> None:
        """Remove the series of a deleted run."""
        for metric in (*self.gauges.values(), *self._counters.values()):
            label_sets = [sample.labels for family in metric.collect() for sample in family.samples]
            for labels in label_sets:
                if (labels["namespace"], labels["run"]) == (namespace, run):
                    metric.remove(*labels.values())


class OperatorMetrics(HostMetrics):
    """What the operator exports: its runs, as every host does, and itself; `catalogue.OPERATOR`."""

    def __init__(self) -> None:
        part = PartRegistry("operator", {})
        super().__init__(part)
        self.reconciles = part.counter(operator.RECONCILES)
        self.reconcile_duration_s = part.histogram(operator.RECONCILE_DURATION)
        self.queue_depth = part.gauge(operator.QUEUE_DEPTH)
        self.queue_oldest_s = part.gauge(operator.QUEUE_OLDEST)
        self.api_requests = part.counter(operator.API_REQUESTS)
        self.recreated = part.counter(operator.RECREATED)
        self.watch_event_timestamp_s = part.gauge(operator.WATCH_EVENT_TIMESTAMP)
        self.watch_lag_s = part.gauge(operator.WATCH_LAG)
        self.loop_lag_s = part.gauge(operator.LOOP_LAG)
        self.leader = part.gauge(operator.LEADER)


def _call_meter(part: PartRegistry) -> CallMeter:
    """Return the meter of the calls that a process answers."""
    return CallMeter(part.counter(every_part.RPC_REQUESTS), part.histogram(every_part.RPC_DURATION))
