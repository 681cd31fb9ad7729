"""What the operator exports of itself, beside its runs."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from vcpo.metrics.host import HostMetrics
from vcpo.metrics.label_values import ReconcileResult
from vcpo.metrics.registry import PartRegistry, start_at_zero

_RECONCILE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class OperatorMetrics(HostMetrics):
    """What the operator exports: its runs, as every host does, and itself."""

    def __init__(self) -> None:
        super().__init__(PartRegistry("operator"))
        registry = self.registry
        self.reconciles = Counter(
            "vcpo_operator_reconciles_total",
            "Reconciles of a run, by result: ok, error or bug.",
            ("result",),
            registry=registry,
        )
        start_at_zero(self.reconciles, ReconcileResult)
        self.reconcile_duration_s = Histogram(
            "vcpo_operator_reconcile_duration_seconds",
            "Duration of one reconcile of a run, API calls included.",
            buckets=_RECONCILE_BUCKETS,
            registry=registry,
        )
        self.queue_oldest_s = Gauge(
            "vcpo_operator_queue_oldest_seconds",
            "Time that the longest waiting run has waited for its reconcile.",
            registry=registry,
        )
        self.api_requests = Counter(
            "vcpo_operator_api_requests_total",
            "Requests of the reconciler to the Kubernetes API; code 0 means no response.",
            ("verb", "resource", "code"),
            registry=registry,
        )
        self.watch_lag_s = Gauge(
            "vcpo_operator_watch_lag_seconds",
            "Age of the oldest own write that the watch has not delivered; 0 when there is none.",
            registry=registry,
        )
