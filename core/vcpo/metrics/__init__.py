"""Metrics of all parts, as plain `prometheus_client` instruments, and the endpoint.

Each metric is declared once, in `learner`, `rollout`, `host`, `operator`, or, if it is a number of
a step, in `vcpo.records.step_record`. Names follow https://prometheus.io/docs/practices/naming: the
prefix `vcpo_`, base units, `_total` for counters, `_ratio` for shares. Each has a rule or a panel
that reads it. Labels are few and bounded: a run's name, a rollout group of its spec (at most 8),
and closed sets of words. Never a step, an id, a time or a message.
"""

from vcpo.metrics.host import HostMetrics
from vcpo.metrics.learner import LearnerMetrics
from vcpo.metrics.operator import OperatorMetrics
from vcpo.metrics.rollout import RolloutMetrics
from vcpo.metrics.server import AddressError, MetricsServer, serve_metrics

__all__ = [
    "AddressError",
    "HostMetrics",
    "LearnerMetrics",
    "MetricsServer",
    "OperatorMetrics",
    "RolloutMetrics",
    "serve_metrics",
]
