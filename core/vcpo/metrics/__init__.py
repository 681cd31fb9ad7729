"""Metrics of all parts, as plain `prometheus_client` instruments, and the endpoint.

Each metric is declared once, in `learner`, `rollout`, `host`, or, as a number of a step, in
`step_gauges`. Names follow https://prometheus.io/docs/practices/naming: the prefix `vcpo_`, base
units, `_total` for counters, `_ratio` for shares. Each has a rule or a panel that reads it. Labels
are few and bounded: a run's name, a rollout group of its spec (at most 8), and closed sets of
words. Never a step, an id, a time or a message.
"""

from vcpo.metrics.host import HostMetrics, OperatorMetrics
from vcpo.metrics.learner import LearnerMetrics
from vcpo.metrics.registry import AddressError, MetricsServer, serve_metrics
from vcpo.metrics.rollout import RolloutMetrics

__all__ = [
    "AddressError",
    "HostMetrics",
    "LearnerMetrics",
    "MetricsServer",
    "OperatorMetrics",
    "RolloutMetrics",
    "serve_metrics",
]
