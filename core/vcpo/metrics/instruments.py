"""The instruments of each part, ready to be set: `metrics.idle_ratio.set(0.4)`.

Attributes are objects of prometheus_client. A metric with labels needs their values first:
`metrics.dropped.labels("stale").inc()`. A counter without labels is exported from the start, at 0;
a gauge of a measured number is exported once it is set.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from vcpo.metrics import catalogue
from vcpo.metrics.registry import PartRegistry


class LearnerMetrics:
    """What a learner exports; `catalogue.LEARNER`."""

    def __init__(self, *, run: str) -> None:
        part = PartRegistry("learner", {"run": run})
        self.registry: CollectorRegistry = part.exported
        # Exported first and set last: a scrape beside a step then never has the new step with old
        # numbers, by which the operator would judge it.
        self.step = part.gauge(catalogue.LEARNER_STEP)
        self.steps = part.counter(catalogue.LEARNER_STEPS)
        self.skipped_steps = part.counter(catalogue.LEARNER_SKIPPED_STEPS)
        self.skipped_steps_in_a_row = part.gauge(catalogue.SKIPPED_STEPS_IN_A_ROW)
        self.step_duration_s = part.histogram(catalogue.LEARNER_STEP_DURATION)
        self.tokens = part.counter(catalogue.LEARNER_TOKENS)
        self.idle_ratio = part.gauge(catalogue.LEARNER_IDLE)
        self.phase = part.gauge(catalogue.LEARNER_PHASE)
        self.checkpoint_timestamp_s = part.gauge(catalogue.LEARNER_CHECKPOINT_TIMESTAMP)
        self.disk_full = part.counter(catalogue.LEARNER_DISK_FULL)
        self.last_step = {
            name: part.gauge(metric) for name, metric in catalogue.STEP_GAUGES.items()
        }
        """Numbers of the last step, by the name of the metric."""
        self.ess_ratio_mean = part.gauge(catalogue.ESS_MEAN)
        self.ess_ratio_low = part.gauge(catalogue.ESS_LOW)
        self.lag_ess_ratio = part.gauge(catalogue.LAG_ESS)
        self.policy_lag_steps = part.histogram(catalogue.POLICY_LAG)
        self.token_lag_median_steps = part.gauge(catalogue.TOKEN_LAG_MEDIAN)
        self.token_lag_max_steps = part.gauge(catalogue.TOKEN_LAG_MAX)
        self.policy_version = part.gauge(catalogue.POLICY_VERSION)
        self.admission_lag_steps = part.gauge(catalogue.ADMISSION_LAG)
        self.batch_trajectories = part.gauge(catalogue.BATCH_TRAJECTORIES)
        self.leased = part.counter(catalogue.TRAJECTORIES_LEASED)
        self.consumed = part.counter(catalogue.TRAJECTORIES_CONSUMED)
        self.wasted_tokens = part.counter(catalogue.TOKENS_WASTED)
        self.dropped = part.counter(catalogue.TRAJECTORIES_DROPPED)
        self.in_flight = part.gauge(catalogue.TRAJECTORIES_IN_FLIGHT)
        self.buffered = part.gauge(catalogue.TRAJECTORIES_BUFFERED)
        self.accounting_errors = part.counter(catalogue.ACCOUNTING_ERRORS)
        self.failures_in_a_row = part.gauge(catalogue.FAILURES_IN_A_ROW)
        self.workers = part.gauge(catalogue.WORKERS)
        self.workers_by_trust = part.gauge(catalogue.WORKERS_BY_TRUST)
        self.calls_refused = part.counter(catalogue.CALLS_REFUSED)
        self.evaluation_accuracy = part.gauge(catalogue.EVALUATION_ACCURACY)


class RolloutMetrics:
    """What a rollout worker exports; `catalogue.ROLLOUT`."""

    def __init__(self, *, run: str, group: str) -> None:
        part = PartRegistry("rollout", {"run": run, "group": group})
        self.registry: CollectorRegistry = part.exported
        self.samples = part.counter(catalogue.ROLLOUT_SAMPLES)
        self.failures = part.counter(catalogue.ROLLOUT_FAILURES)
        self.tokens = part.counter(catalogue.ROLLOUT_TOKENS)
        self.restarted = part.counter(catalogue.ROLLOUT_RESTARTED)
        self.tokens_released = part.counter(catalogue.ROLLOUT_TOKENS_RELEASED)
        self.tokens_resumed = part.counter(catalogue.ROLLOUT_TOKENS_RESUMED)
        self.generation_s = part.histogram(catalogue.ROLLOUT_GENERATION)
        self.in_flight = part.gauge(catalogue.ROLLOUT_INFLIGHT)
        self.weights_version = part.gauge(catalogue.ROLLOUT_WEIGHTS_VERSION)
        self.weight_sync_duration_s = part.histogram(catalogue.ROLLOUT_WEIGHT_SYNC_DURATION)
        self.weight_sync_bytes = part.counter(catalogue.ROLLOUT_WEIGHT_SYNC_BYTES)
        self.peers_avoided = part.counter(catalogue.ROLLOUT_PEERS_AVOIDED)
        self.weight_updates_in_flight = part.counter(catalogue.ROLLOUT_WEIGHT_UPDATES_IN_FLIGHT)
        self.sandbox_missing = part.gauge(catalogue.ROLLOUT_SANDBOX_MISSING)
        self.sandbox_folders_left = part.gauge(catalogue.ROLLOUT_SANDBOX_FOLDERS_LEFT)
        self.lease_wait_s = part.counter(catalogue.ROLLOUT_LEASE_WAIT)


class HostMetrics:
    """What a host exports for all of its runs; `catalogue.HOST`."""

    def __init__(self, part: PartRegistry | None = None) -> None:
        part = part or PartRegistry("host", {})
        self.registry: CollectorRegistry = part.exported
        self.run_info = part.gauge(catalogue.RUN_INFO)
        self.condition = part.gauge(catalogue.RUN_CONDITION)
        self.replicas = part.gauge(catalogue.RUN_REPLICAS)
        self.decisions = part.counter(catalogue.RUN_DECISIONS)
        self.failures = part.counter(catalogue.RUN_FAILURES)

    def set_condition(self, namespace: str, run: str, condition: str, status: str) -> None:
        """Show a condition: 1 at its status, 0 at the others.

        Raises: ValueError when the status is not in `catalogue.CONDITION_STATUSES`.
        """
        if status not in catalogue.CONDITION_STATUSES:
            allowed = ", ".join(catalogue.CONDITION_STATUSES)
            raise ValueError(f"status must be one of {allowed}, not '{status}'")
        for each in catalogue.CONDITION_STATUSES:
            self.condition.labels(namespace, run, condition, each).set(float(each == status))

    def forget(self, namespace: str, run: str) -> None:
        """Remove the series of a deleted run."""
        per_run = (self.run_info, self.condition, self.replicas, self.decisions, self.failures)
        for metric in per_run:
            label_sets = [sample.labels for family in metric.collect() for sample in family.samples]
            for labels in label_sets:
                if (labels["namespace"], labels["run"]) == (namespace, run):
                    metric.remove(*labels.values())


class OperatorMetrics(HostMetrics):
    """What the operator exports: its runs, as every host does, and itself; `catalogue.OPERATOR`."""

    def __init__(self) -> None:
        part = PartRegistry("operator", {})
        super().__init__(part)
        self.reconciles = part.counter(catalogue.OPERATOR_RECONCILES)
        self.reconcile_duration_s = part.histogram(catalogue.OPERATOR_RECONCILE_DURATION)
        self.queue_depth = part.gauge(catalogue.OPERATOR_QUEUE_DEPTH)
        self.queue_oldest_s = part.gauge(catalogue.OPERATOR_QUEUE_OLDEST)
        self.api_requests = part.counter(catalogue.OPERATOR_API_REQUESTS)
        self.recreated = part.counter(catalogue.OPERATOR_RECREATED)
        self.watch_event_timestamp_s = part.gauge(catalogue.OPERATOR_WATCH_EVENT_TIMESTAMP)
        self.watch_echo_lag_s = part.gauge(catalogue.OPERATOR_WATCH_ECHO_LAG)
        self.loop_lag_s = part.gauge(catalogue.OPERATOR_LOOP_LAG)
