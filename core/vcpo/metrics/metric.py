"""The declaration of a metric: everything but its value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar, overload

from prometheus_client import Counter, Gauge, Histogram

from vcpo.records.step_chart import Unit

if TYPE_CHECKING:
    from vcpo.metrics.registry import BatchHistogram

_Instrument = TypeVar("_Instrument")


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
    REWARD_PARTS = "rewards that have parts"
    EVALUATION = "an evaluation that has ended"
    CHECKPOINT = "a checkpoint that was written"
    SINKS = "sinks in spec.tracking"
    LOCAL = "`vcpo run` as host"
    STARTING = "a run that has not taken a step"
    CERTIFICATES = "a run in a cluster whose calls are encrypted"
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


class Exporting(Protocol):
    """A part whose metrics are exported."""

    @property
    def made(self) -> Mapping[str, Any]:
        """The instruments by the name of their metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(Generic[_Instrument]):
    """The declaration of one metric, as an attribute of the part that exports it.

    On the class the attribute is the declaration; on an object of it, the instrument.
    """

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
    in_batches: bool = False
    """Whether a histogram takes the values of a whole batch at once."""

    @overload
    def __get__(self, part: None, owner: type) -> Self: ...
    @overload
    def __get__(self, part: Exporting, owner: type) -> _Instrument: ...
    def __get__(self, part: Exporting | None, owner: type) -> Any:
        """Return the declaration, or the instrument of an object."""
        return self if part is None else part.made[self.name]

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


def declared_metrics(part: type) -> tuple[Metric[Any], ...]:
    """Return the metrics that a class declares, without those of its bases."""
    return tuple(each for each in vars(part).values() if isinstance(each, Metric))


_UNITS: Final = {
    "timestamp_seconds": Unit.UNIX_SECONDS,
    "seconds": Unit.SECONDS,
    "bytes": Unit.BYTES,
    "ratio": Unit.RATIO,
    "nats": Unit.NATS,
    "tokens": Unit.TOKENS,
    "steps": Unit.STEPS,
    "step": Unit.STEPS,
    "versions": Unit.VERSIONS,
    "version": Unit.VERSIONS,
    "trajectories": Unit.TRAJECTORIES,
}


def unit_in_name(name: str) -> Unit:
    """Return the unit that a metric's name ends in; a count where it ends in none."""
    stem = name.removesuffix("_total")
    return next((unit for word, unit in _UNITS.items() if stem.endswith(f"_{word}")), Unit.COUNT)


def counter(name: str, help_text: str, *labels: Label, **options: Any) -> Metric[Counter]:
    """Declare a counter; options: fields of `Metric`, as for the others."""
    return Metric(**_fields(name, MetricKind.COUNTER, help_text) | options, labels=labels)


def gauge(name: str, help_text: str, *labels: Label, **options: Any) -> Metric[Gauge]:
    """Declare a gauge that is exported from the start, or with labels from its first value."""
    return Metric(**_fields(name, MetricKind.GAUGE, help_text) | options, labels=labels)


def measure(name: str, help_text: str, **options: Any) -> Metric[Gauge]:
    """Declare a gauge of a measured number: it is exported once it was set."""
    return gauge(name, help_text, absent_until_set=True, **options)


def histogram(
    name: str, help_text: str, buckets: tuple[float, ...], *labels: Label, **options: Any
) -> Metric[Histogram]:
    """Declare a histogram by the upper bounds of its buckets, without +Inf."""
    fields = _fields(name, MetricKind.HISTOGRAM, help_text) | options
    return Metric(**fields, buckets=buckets, labels=labels)


def batch_histogram(
    name: str, help_text: str, buckets: tuple[float, ...], **options: Any
) -> Metric[BatchHistogram]:
    """Declare a histogram that takes the values of a whole batch at once."""
    fields = _fields(name, MetricKind.HISTOGRAM, help_text) | options
    return Metric(**fields, buckets=buckets, in_batches=True)


def _fields(name: str, kind: MetricKind, help_text: str) -> dict[str, Any]:
    return {"name": name, "kind": kind, "help": help_text, "unit": unit_in_name(name)}
