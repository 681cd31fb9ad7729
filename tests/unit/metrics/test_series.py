"""The number of series of a run is bounded, by declaration and in a registry where all are used."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from vcpo.metrics import Metric, MetricKind, catalogue
from vcpo.metrics.metric import Label
from vcpo.metrics.registry import PartRegistry
from vcpo.wire.call_meter import METHODS
from vcpo.wire.v1 import control_pb2, policy_pb2, work_pb2

OF_THE_PROCESS = 7
"""`process_*` and `python_info`, as the client exports them on Linux."""


def calls(num_methods: int) -> int:
    """Series of the calls of a server with this many methods; `other` is counted and not timed."""
    of_one = sum(metric.most_series for metric in catalogue.SERVER) // len(METHODS)
    return of_one * num_methods + 1


def most_series(*metrics: Metric, num_groups: int = 8) -> int:
    series = 0
    for metric in metrics:
        groups = next((label for label in metric.labels if label.name == "group"), None)
        share = num_groups / groups.num_values if groups else 1
        series += round(metric.most_series * share)
    return series


def served(*files: object) -> int:
    services = [one for file in files for one in file.DESCRIPTOR.services_by_name.values()]
    return sum(len(service.methods) for service in services)


def test_a_learner_has_at_most_335_series():
    num_methods = served(work_pb2, policy_pb2, control_pb2)
    own = most_series(catalogue.BUILD_INFO, *catalogue.LEARNER)
    assert own + calls(num_methods) + OF_THE_PROCESS <= 335


def test_a_worker_has_at_most_95_series_and_100_with_vllm():
    own = (catalogue.BUILD_INFO, *catalogue.ROLLOUT)
    everywhere = [metric for metric in own if metric.appears_with is None]
    served_to_peers = calls(1)
    process = OF_THE_PROCESS + served_to_peers
    assert most_series(*everywhere) + process <= 95
    assert most_series(*own, *catalogue.ROLLOUT_ENGINE) + process <= 100


@pytest.mark.parametrize(("num_groups", "bound"), [(1, 75), (8, 100)])
def test_a_run_has_at_most_75_series_on_its_host_and_100_with_8_groups(num_groups, bound):
    assert most_series(*catalogue.HOST, num_groups=num_groups) <= bound


@pytest.mark.parametrize("metric", catalogue.ALL[1:], ids=lambda metric: metric.name)
def test_a_metric_that_is_used_to_the_full_has_the_series_that_its_declaration_promises(metric):
    part = PartRegistry("part", {})
    instrument: Any = part.make(metric)
    for values in product(*(values_of(label) for label in metric.labels)):
        one = instrument.labels(*values) if values else instrument
        if metric.in_batches:
            one.observe_all([1.0])
        else:
            one.observe(1.0) if metric.kind is MetricKind.HISTOGRAM else one.inc()
    if metric.absent_until_set:
        instrument.set(1.0)
    own = metric.name.removesuffix("_total")
    series = [each.samples for each in part.exported.collect() if each.name == own]
    assert [len(samples) for samples in series] == [metric.most_series]


def values_of(label: Label) -> tuple[str, ...]:
    return label.values or tuple(f"{label.name}{number}" for number in range(label.at_most))
