"""What a host exports for each of its runs, and the operator of itself."""

from vcpo.metrics.label_values import ReconcileResult, ThrottleDirection
from vcpo.metrics.registry import PartRegistry

_RECONCILE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_RUN = "namespace run"
"""First labels of each metric of a host, which has several runs."""


class HostMetrics:
    """What a host exports for all of its runs.

    A local run has an empty namespace. The scrape needs `honorLabels`.
    """

    def __init__(self, registry: PartRegistry | None = None) -> None:
        self.registry = PartRegistry("host") if registry is None else registry
        self._declare_spec()
        self._declare_state()
        self._declare_times()

    def _declare_spec(self) -> None:
        self.run_info = self.registry.gauge(
            "vcpo_run_info",
            "Always 1; the labels name model, environment and method, and the run's owner and"
            " team.",
            f"{_RUN} model environment method owner team",
        )
        self.run_steps = self.registry.gauge(
            "vcpo_run_steps", "Optimizer steps that the run's spec asks for.", _RUN
        )
        self.run_max_policy_lag = self.registry.gauge(
            "vcpo_run_max_policy_lag_steps",
            "Largest lag of a token that the run's spec allows, in policy versions.",
            _RUN,
        )
        self.run_checkpoint_interval = self.registry.gauge(
            "vcpo_run_checkpoint_interval_steps",
            "Optimizer steps from one checkpoint to the next, as the run's spec asks for.",
            _RUN,
        )
        self.run_ess_floor = self.registry.gauge(
            "vcpo_run_ess_floor_ratio",
            "Share of the on-policy ESS ratio below which the host throttles.",
            _RUN,
        )

    def _declare_state(self) -> None:
        self.run_lag_limit = self.registry.gauge(
            "vcpo_run_admission_lag_steps",
            "Lag limit that the host has set; below the spec's while the run is throttled.",
            _RUN,
        )
        self.throttles = self.registry.counter(
            "vcpo_run_throttles_total",
            "Changes of the lag limit by the host, by direction.",
            f"{_RUN} direction",
        )
        self.run_condition = self.registry.gauge(
            "vcpo_run_condition",
            "1 for the current status of a condition, 0 for the others.",
            f"{_RUN} condition status",
        )
        self.run_condition_reason = self.registry.gauge(
            "vcpo_run_condition_reason",
            "1 for the current reason of a condition; other reasons are absent.",
            f"{_RUN} condition reason",
        )
        self.run_replicas = self.registry.gauge(
            "vcpo_run_replicas",
            "Rollout workers of a rollout group, by state: desired or ready.",
            f"{_RUN} group state",
        )
        self.learner_restarts = self.registry.counter(
            "vcpo_run_learner_restarts_total", "Times that the run's learner was restarted.", _RUN
        )

    def _declare_times(self) -> None:
        self.run_signals_age = self.registry.gauge(
            "vcpo_run_signals_age_seconds",
            "Age of the newest signals of the learner that the host has.",
            _RUN,
        )
        self.run_start_timestamp = self.registry.gauge(
            "vcpo_run_start_timestamp_seconds",
            "Unix time at which the run was started, resumed or retried last.",
            _RUN,
        )
        self.run_startup_deadline = self.registry.gauge(
            "vcpo_run_startup_deadline_timestamp_seconds",
            "Unix time at which the run fails unless it has taken a step; absent once it has.",
            _RUN,
        )
        self.run_certificate_end = self.registry.gauge(
            "vcpo_run_certificate_end_timestamp_seconds",
            "Unix time at which the first certificate of the run's pods ends.",
            _RUN,
        )

    def count_from_zero(self, namespace: str, run: str) -> None:
        """Export the counters of a run at 0, so that `increase()` sees their first event."""
        for direction in ThrottleDirection:
            self.throttles.labels(namespace, run, direction)
        self.learner_restarts.labels(namespace, run)

    def forget_counts(self, namespace: str, run: str) -> None:
        for direction in ThrottleDirection:
            self.throttles.remove(namespace, run, direction)
        self.learner_restarts.remove(namespace, run)


class OperatorMetrics(HostMetrics):
    """What the operator exports: its runs, as every host does, and itself."""

    def __init__(self) -> None:
        super().__init__(PartRegistry("operator"))
        registry = self.registry
        self.reconciles = registry.counter(
            "vcpo_operator_reconciles_total",
            "Reconciles of a run, by result: ok, error or bug.",
            result=ReconcileResult,
        )
        self.reconcile_duration_s = registry.histogram(
            "vcpo_operator_reconcile_duration_seconds",
            "Duration of one reconcile of a run, API calls included.",
            buckets=_RECONCILE_BUCKETS,
        )
        self.queue_oldest_s = registry.gauge(
            "vcpo_operator_queue_oldest_seconds",
            "Time that the longest waiting run has waited for its reconcile.",
        )
        self.api_requests = registry.counter(
            "vcpo_operator_api_requests_total",
            "Requests of the reconciler to the Kubernetes API; code 0 means no response.",
            "verb resource code",
        )
        self.watch_lag_s = registry.gauge(
            "vcpo_operator_watch_lag_seconds",
            "Age of the oldest own write that the watch has not delivered; 0 when there is none.",
        )
