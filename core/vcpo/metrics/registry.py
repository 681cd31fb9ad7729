"""The registry of one part of a run, and instruments whose start Prometheus reads right."""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib import metadata
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import Metric as Family


class PartRegistry(CollectorRegistry):
    """A registry that adds constant labels to every series.

    It leaves out gauges that nobody has set, which hold NaN: no alert fires on a 0 that nobody
    measured. It also leaves out `_created`, the start time of a counter, which doubles the series.

    part: `learner`, `rollout`, `host` or `operator`; a label of `vcpo_build_info`.
    """

    def __init__(self, part: str, **labels: str) -> None:
        super().__init__()
        self._constant = labels
        ProcessCollector(registry=self)
        PlatformCollector(registry=self)
        build = Gauge(
            "vcpo_build_info",
            "Always 1; the labels name the part and its version.",
            ("part", "version"),
            registry=self,
        )
        build.labels(part, metadata.version("vcpo")).set(1)

    def collect(self) -> Iterable[Family]:
        """Yield the families with their constant labels."""
        for family in super().collect():
            labeled = Family(family.name, family.documentation, family.type, family.unit)
            labeled.samples = [
                sample._replace(labels={**self._constant, **sample.labels})
                for sample in family.samples
                if not (sample.name.endswith("_created") or math.isnan(sample.value))
            ]
            yield labeled


def measure(name: str, text: str, registry: CollectorRegistry) -> Gauge:
    """Return a gauge that is exported once it was set."""
    gauge = Gauge(name, text, registry=registry)
    gauge.set(math.nan)
    return gauge


def start_at_zero(counter: Counter, *values: Iterable[str]) -> Counter:
    """Export a counter at 0 for all values of its labels.

    `increase()` does not see the first event of a series that begins with it.
    """
    for each in product(*values):
        counter.labels(*each)
    return counter
