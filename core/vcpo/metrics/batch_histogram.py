"""A histogram that takes the values of a whole batch at once.

`prometheus_client.Histogram` takes a lock twice for each value. A learner's event loop observes
several numbers of each trajectory of a batch after every step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf
from threading import Lock

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from vcpo.metrics.metric import Metric


class BatchHistogram(Collector):
    """A histogram without labels. Threads may observe and collect at the same time.

    edges: upper bounds of its buckets, ascending, without +Inf.
    """

    def __init__(self, metric: Metric, edges: Sequence[float]) -> None:
        self._metric = metric
        self._edges = (*edges, inf)
        self._lock = Lock()
        self._counts = [0] * len(self._edges)
        self._sum = 0.0

    def observe_all(self, values: Sequence[float]) -> None:
        """Count each value; none is NaN."""
        counts = Counter(bisect_left(self._edges, value) for value in values)
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
