"""The registry of one part of a run: its metrics and constant labels, without global state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata

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

from vcpo.metrics.batch_histogram import BatchHistogram
from vcpo.metrics.catalogue.every_part import BUILD_INFO
from vcpo.metrics.metric import Metric, label_values


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
        self.gauge(BUILD_INFO).labels(part, metadata.version("vcpo")).set(1)

    def counter(self, metric: Metric) -> Counter:
        """Make a counter; it is exported at 0 for all values of its labels that are closed sets.

        `increase()` does not see the first event of a series that begins with it.
        """
        counter = Counter(metric.name, metric.help, metric.label_names, registry=None)
        if metric.labels:
            for values in label_values(metric.labels):
                counter.labels(*values)
        self._export(counter)
        return counter

    def gauge(self, metric: Metric) -> Gauge:
        """Make a gauge."""
        gauge = Gauge(metric.name, metric.help, metric.label_names, registry=None)
        if metric.absent_until_set:
            gauge.set(math.nan)
        self._export(gauge)
        return gauge

    def histogram(self, metric: Metric) -> Histogram:
        """Make a histogram with the catalogue's buckets."""
        histogram = Histogram(
            metric.name, metric.help, metric.label_names, registry=None, buckets=metric.buckets
        )
        self._export(histogram)
        return histogram

    def batch_histogram(self, metric: Metric, edges: Sequence[float] = ()) -> BatchHistogram:
        """Make a histogram with these upper bounds of buckets, or with the catalogue's."""
        histogram = BatchHistogram(metric, tuple(edges) or metric.buckets)
        self._export(histogram)
        return histogram

    def _export(self, collector: Collector) -> None:
        self.exported.register(_Labeled(collector, self._labels))


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
