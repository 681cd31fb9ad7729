"""Metrics of all parts: the catalogue, the instruments and the endpoint."""

from vcpo.metrics.catalogue.host import HostMetrics
from vcpo.metrics.catalogue.learner import LearnerMetrics
from vcpo.metrics.catalogue.operator import OperatorMetrics
from vcpo.metrics.catalogue.rollout import RolloutMetrics
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
