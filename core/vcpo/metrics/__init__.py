"""Metrics of all parts: the catalogue, the instruments and the endpoint."""

from vcpo.metrics.instruments import HostMetrics, LearnerMetrics, OperatorMetrics, RolloutMetrics
from vcpo.metrics.metric import Metric, MetricKind
from vcpo.metrics.server import AddressError, MetricsServer, serve_metrics

__all__ = [
    "AddressError",
    "HostMetrics",
    "LearnerMetrics",
    "Metric",
    "MetricKind",
    "MetricsServer",
    "OperatorMetrics",
    "RolloutMetrics",
    "serve_metrics",
]
