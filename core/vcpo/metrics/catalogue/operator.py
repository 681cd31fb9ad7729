"""What the operator exports of itself."""

from __future__ import annotations

from vcpo.metrics.catalogue.host import HostMetrics
from vcpo.metrics.label_values import ReconcileResult
from vcpo.metrics.metric import Feature, Label, counter, declared_metrics, gauge, histogram
from vcpo.metrics.registry import PartRegistry
from vcpo.records.step_chart import Unit

_RECONCILE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class OperatorMetrics(HostMetrics):
    """What the operator exports: its runs, as every host does, and itself."""

    reconciles = counter(
        "vcpo_operator_reconciles_total",
        "Reconciles of a run, by result: ok, error or bug.",
        Label("result", tuple(ReconcileResult)),
    )
    reconcile_duration_s = histogram(
        "vcpo_operator_reconcile_duration_seconds",
        "Duration of one reconcile of a run, API calls included.",
        _RECONCILE_BUCKETS,
    )
    queue_depth = gauge("vcpo_operator_queue_depth", "Runs that wait for a reconcile.")
    queue_oldest_s = gauge(
        "vcpo_operator_queue_oldest_seconds",
        "Time that the longest waiting run has waited for its reconcile.",
    )
    api_requests = counter(
        "vcpo_operator_api_requests_total",
        "Requests of the reconciler to the Kubernetes API; code 0 means no response.",
        Label("verb", at_most=6),
        Label("resource", at_most=16),
        Label("code", at_most=12),
    )
    recreated = counter(
        "vcpo_operator_recreated_total",
        "Objects that somebody else deleted and the operator created again, by kind.",
        Label("kind", at_most=12),
        appears_with=Feature.DELETED_CHILD,
    )
    watch_event_timestamp_s = gauge(
        "vcpo_operator_watch_event_timestamp_seconds",
        "Unix time of the newest event of a watched resource.",
        Label("resource", at_most=12),
    )
    watch_lag_s = gauge(
        "vcpo_operator_watch_lag_seconds",
        "Age of the oldest own write that the watch has not delivered; 0 when there is none.",
    )
    loop_lag_s = gauge(
        "vcpo_operator_loop_lag_seconds", "Delay of the latest timer of the operator's event loop."
    )
    leader = gauge(
        "vcpo_operator_leader",
        "1 while the operator reconciles runs.",
        unit=Unit.FLAG,
    )

    def __init__(self) -> None:
        super().__init__(PartRegistry("operator", {}))


OPERATOR = declared_metrics(OperatorMetrics)
"""Metrics of the operator itself, besides those of every part and the host's."""
