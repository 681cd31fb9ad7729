"""A batch histogram exports what `prometheus_client.Histogram` would, at a fraction of the cost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Histogram

from vcpo.metrics import Metric, MetricKind
from vcpo.metrics.registry import BatchHistogram
from vcpo.records.step_chart import Unit

METRIC = Metric(
    name="vcpo_lengths_tokens", kind=MetricKind.HISTOGRAM, help="Lengths.", unit=Unit.TOKENS
)
EDGES = (-1.0, 0.0, 0.5, 8.0)


def samples(collector) -> dict[tuple[str, str], float]:
    return {
        (each.name, each.labels.get("le", "")): each.value
        for family in collector.collect()
        for each in family.samples
        if not each.name.endswith("_created")
    }


@pytest.mark.parametrize("edges", [EDGES, EDGES[1:]], ids=["with negative edges", "without"])
@given(batches=st.lists(st.lists(st.floats(-16, 16)), max_size=4))
def test_it_exports_the_samples_of_the_librarys_histogram(edges, batches):
    batch = BatchHistogram(METRIC, edges)
    library = Histogram(METRIC.name, METRIC.help, buckets=edges, registry=None)
    for values in batches:
        batch.observe_all(values)
        for value in values:
            library.observe(value)
    assert samples(batch) == pytest.approx(samples(library))


def test_a_value_at_an_edge_is_in_the_bucket_below_it():
    histogram = BatchHistogram(METRIC, (1.0, 2.0))
    histogram.observe_all([1.0, 2.0, 2.5])
    name = METRIC.name
    assert samples(histogram) == {
        (f"{name}_bucket", "1.0"): 1,
        (f"{name}_bucket", "2.0"): 2,
        (f"{name}_bucket", "+Inf"): 3,
        (f"{name}_count", ""): 3,
        (f"{name}_sum", ""): 5.5,
    }


def test_a_weight_of_zero_is_in_the_first_bucket():
    histogram = BatchHistogram(METRIC, EDGES)
    histogram.observe_all([-math.inf])
    assert samples(histogram)[(f"{METRIC.name}_bucket", "-1.0")] == 1
