"""What is known of a metric before it has a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Type of a metric, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric, before any value."""

    name: str
    """Full name as it is queried; a histogram's without `_bucket`, `_sum`, `_count`."""
    kind: Kind
    help: str
    """One sentence: what it counts or measures, and its unit where the name does not say it."""
    labels: tuple[str, ...] = ()
    """Labels besides those that the exporting part adds to everything."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending, without +Inf; empty for other types."""
    absent_until_set: bool = False
    """A gauge of something measured: without a first value it is not exported, so that an alert
    never fires on a 0 that nobody measured. It is set, never increased."""
