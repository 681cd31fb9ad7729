"""The instruments of one part of a run under its constant labels, without global state."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from itertools import accumulate
from math import inf
from threading import Lock
from typing import Any, TypeVar, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from vcpo.metrics.metric import (
    Feature,
    Label,
    Metric,
    MetricKind,
    counter,
    declared_metrics,
    gauge,
    histogram,
    label_values,
)
from vcpo.records.step_chart import Unit
from vcpo.wire.call_meter import METHODS

_Instrument = TypeVar("_Instrument")


BUILD_INFO = gauge(
    "vcpo_build_info",
    "Always 1; the labels name the part and its version.",
    Label("part"),
    Label("version"),
    unit=Unit.FLAG,
)

_CALL_BUCKETS = (0.01, 0.1, 1.0, 10.0)

RPC_REQUESTS = counter(
    "vcpo_rpc_requests_total",
    "Calls that a server of the run has answered or refused, by method and status code.",
    Label("method", METHODS),
    Label("code", at_most=2),
    appears_with=Feature.CALLED,
)
RPC_DURATION = histogram(
    "vcpo_rpc_duration_seconds",
    "Duration of a call, by method; Lease, Recall and GetManifest wait for something to say.",
    _CALL_BUCKETS,
    Label("method", METHODS),
    appears_with=Feature.CALLED,
)

SERVER = (RPC_REQUESTS, RPC_DURATION)
"""Metrics of a process that serves calls: a learner."""


class BatchHistogram(Collector):
    """A histogram without labels that takes the values of a whole batch at once.

    `prometheus_client.Histogram` takes a lock twice for each value, and an event loop observes
    several numbers of each trajectory. Threads may observe and collect at the same time.

    edges: upper bounds of its buckets, ascending, without +Inf.
    """

    def __init__(self, metric: Metric[Any], edges: Sequence[float]) -> None:
        self._metric = metric
        self._edges = (*edges, inf)
        self._lock = Lock()
        self._counts = [0] * len(self._edges)
        self._sum = 0.0

    def observe_all(self, values: Sequence[float]) -> None:
        """Count each value; none is NaN."""
        counts = Counts(bisect_left(self._edges, value) for value in values)
        total = sum(values)
        with self._lock:
            for bucket, count in counts.items():
                self._counts[bucket] += count
            self._sum += total

    def collect(self) -> Iterable[Family]:
        """Return the family, as `prometheus_client.Histogram` does.

        Values below 0 would let the sum fall, which looks like a restart. Such a histogram has no
        sum.
        """
        with self._lock:
            counts, total = list(self._counts), self._sum
        family = Family(self._metric.name, self._metric.help, "histogram")
        name = self._metric.name
        for edge, count in zip(self._edges, accumulate(counts), strict=True):
            family.add_sample(
                f"{name}_bucket", {"le": "+Inf" if edge == inf else str(float(edge))}, count
            )
        family.add_sample(f"{name}_count", {}, sum(counts))
        if self._edges[0] >= 0.0:
            family.add_sample(f"{name}_sum", {}, total)
        yield family


class PartRegistry:
    """Makes the instruments of one part and exports them with labels common to all of them.

    part: `learner`, `rollout`, `host` or `operator`; a label of `vcpo_build_info`.
    labels: added to every series, also to those about the process and the platform.
    """

    def __init__(self, part: str, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self.exported = CollectorRegistry()
        """The registry that a server exports."""
        self._export(ProcessCollector(registry=None))
        self._export(PlatformCollector(registry=None))
        self.make(BUILD_INFO).labels(part, metadata.version("vcpo")).set(1)

    def make(self, metric: Metric[_Instrument], edges: Sequence[float] = ()) -> _Instrument:
        """Make and export an instrument.

        A counter is exported at 0 for all values of its labels that are closed sets: `increase()`
        does not see the first event of a series that begins with it.

        edges: upper bounds of the buckets of a histogram for batches; none are the catalogue's.
        """
        name, text, labels, made = metric.name, metric.help, metric.label_names, cast("Any", None)
        if metric.in_batches:
            made = BatchHistogram(metric, tuple(edges) or metric.buckets)
        elif metric.kind is MetricKind.HISTOGRAM:
            made = Histogram(name, text, labels, registry=None, buckets=metric.buckets)
        elif metric.kind is MetricKind.COUNTER:
            made = Counter(name, text, labels, registry=None)
            for values in label_values(metric.labels) if labels else ():
                made.labels(*values)
        else:
            made = Gauge(name, text, labels, registry=None)
            if metric.absent_until_set:
                made.set(math.nan)
        self._export(made)
        return cast("_Instrument", made)

    def _export(self, collector: Collector) -> None:
        self.exported.register(_Labeled(collector, self._labels))


class Instruments:
    """What a part exports: the metrics that its class and its bases declare.

    `metrics.idle_ratio.set(0.4)`; a metric with labels needs their values first:
    `metrics.dropped.labels("stale").inc()`. Instruments are those of prometheus_client, or a
    `BatchHistogram`.

    edges: bucket edges of single histograms, by name.
    """

    def __init__(
        self, part: PartRegistry, edges: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        self.registry = part.exported
        """What a server exports."""
        self.made: Mapping[str, Any] = {
            metric.name: part.make(metric, (edges or {}).get(metric.name, ()))
            for owner in reversed(type(self).__mro__)
            for metric in declared_metrics(owner)
        }
        """The instruments by the name of their metric."""


class _Labeled(Collector):
    """A collector that adds constant labels to its samples and leaves out two sorts of samples.

    NaN is the value of a gauge that nobody has set. `_created` is the start time of a counter. Such
    samples double the number of series, their names break the naming rules, and the client can
    switch them off only for the whole process.
    """

    def __init__(self, inner: Collector, labels: Mapping[str, str]) -> None:
        self._inner = inner
        self._labels = labels

    def collect(self) -> Iterable[Family]:
        for family in self._inner.collect():
            labeled = Family(family.name, family.documentation, family.type, family.unit)
            labeled.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in family.samples
                if not (sample.name.endswith("_created") or math.isnan(sample.value))
            ]
            yield labeled

    def describe(self) -> Iterable[Family]:
        """Return the families, so that a scrape can ask for some of them."""
        return self.collect()
