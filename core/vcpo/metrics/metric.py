"""The declaration of a metric: everything but its value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from vcpo.records.step_chart import Unit


class MetricKind(StrEnum):
    """Type of a metric, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Feature(StrEnum):
    """What a deployment must have for some metrics to have a sample."""

    GPU = "a GPU"
    VLLM = "the engine vllm"
    GRADIENT_NORMS = "gradient norms, which the last step measured"
    EVALUATION = "an evaluation that has ended"
    CHECKPOINT = "a checkpoint that was written"
    SINKS = "sinks in spec.tracking"
    LOCAL = "`vcpo run` as host"
    STARTING = "a run that has not taken a step"
    CALLED = "a call to the process"
    DELETED_CHILD = "an object of a run that somebody deleted"


@dataclass(frozen=True, slots=True)
class Label:
    """A label of a metric, and how many values it has at most."""

    name: str
    values: tuple[str, ...] = ()
    """All values that it may have; empty where the set is not closed."""
    at_most: int = 1
    """Largest number of values in one exposition, for one run, where the set is not closed."""

    @property
    def num_values(self) -> int:
        """Largest number of values in one exposition, for one run."""
        return len(self.values) or self.at_most


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The declaration of one metric."""

    name: str
    """Full name in a query; of a histogram without `_bucket`, `_sum` and `_count`."""
    kind: MetricKind
    help: str
    """One sentence: what it counts or measures, and its unit where the name does not say it."""
    unit: Unit
    labels: tuple[Label, ...] = ()
    """Labels besides those that the exporting part adds to all of its metrics."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending, without +Inf; empty for other types. Where
    a run's spec decides, those of the default spec."""
    absent_until_set: bool = False
    """Whether a gauge is exported only after it was set, so that no alert fires on a 0 that nobody
    measured. Such a gauge is set, never increased."""
    appears_with: Feature | None = None
    """What a deployment must have for a sample of it; None where every process of the part has one
    once its run has taken two steps."""

    not_shown: str = ""
    """Why no board and no alert uses it; empty where one does."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of `labels`."""
        return tuple(label.name for label in self.labels)

    @property
    def most_series(self) -> int:
        """Largest number of series of it in one exposition, for one run."""
        # A histogram's buckets, that of +Inf, count and sum; no sum where values may be negative.
        per_label_set = len(self.buckets) + 3 if self.kind is MetricKind.HISTOGRAM else 1
        if self.buckets and self.buckets[0] < 0.0:
            per_label_set -= 1
        for label in self.labels:
            per_label_set *= label.num_values
        return per_label_set


def label_values(labels: Sequence[Label]) -> Iterator[tuple[str, ...]]:
    """Yield every combination of the labels' values; nothing where a set is not closed."""
    return product(*(label.values for label in labels))
