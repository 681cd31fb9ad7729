"""The declaration of a metric: everything but its value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricKind(StrEnum):
    """Type of a metric, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The declaration of one metric."""

    name: str
    """Full name in a query; of a histogram without `_bucket`, `_sum` and `_count`."""
    kind: MetricKind
    help: str
    """One sentence: what it counts or measures, and its unit where the name does not say it."""
    labels: tuple[str, ...] = ()
    """Labels besides those that the exporting part adds to all of its metrics."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending, without +Inf; empty for other types."""
    absent_until_set: bool = False
    """Whether a gauge is exported only after it was set, so that no alert fires on a 0 that nobody
    measured. Such a gauge is set, never increased."""
