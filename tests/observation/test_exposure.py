"""The comparison of exposed and declared metrics, on names written by hand."""

from __future__ import annotations

from tests.fixtures.observation.exposure import compare
from vcpo.metrics.metric import Feature, Metric, MetricKind, Unit

DECLARED = (
    Metric(name="vcpo_steps_total", kind=MetricKind.COUNTER, help="Steps.", unit=Unit.COUNT),
    Metric(
        name="vcpo_lag_steps",
        kind=MetricKind.HISTOGRAM,
        help="Lags.",
        unit=Unit.COUNT,
        buckets=(1.0,),
    ),
)
ALL = {"vcpo_steps_total", "vcpo_lag_steps_bucket", "vcpo_lag_steps_sum", "vcpo_lag_steps_count"}


def test_what_is_declared_and_exposed_and_what_the_library_adds_is_no_difference():
    same = compare(ALL | {"process_open_fds", "python_info"}, DECLARED)
    assert (same.undeclared, same.missing) == ((), ())


def test_a_sample_that_nobody_declared_is_told_by_its_name():
    assert compare(ALL | {"vcpo_surprise", "go_info"}, DECLARED).undeclared == (
        "go_info",
        "vcpo_surprise",
    )


def test_a_family_without_a_sample_is_missing_and_so_is_a_histogram_without_its_buckets():
    names = ALL - {"vcpo_steps_total", "vcpo_lag_steps_bucket"}
    assert compare(names, DECLARED).missing == ("vcpo_lag_steps", "vcpo_steps_total")


def test_what_needs_a_feature_is_missing_only_on_a_run_that_had_it():
    memory = Metric(
        name="vcpo_memory_bytes",
        kind=MetricKind.GAUGE,
        help="Memory.",
        unit=Unit.COUNT,
        appears_with=Feature.GPU,
    )
    assert compare(ALL, (*DECLARED, memory), {Feature.VLLM}).missing == ()
    assert compare(ALL, (*DECLARED, memory), {Feature.GPU}).missing == ("vcpo_memory_bytes",)


def test_a_histogram_of_values_below_zero_has_no_sum():
    weights = Metric(
        name="vcpo_weight_nats",
        kind=MetricKind.HISTOGRAM,
        help="Weights.",
        unit=Unit.COUNT,
        buckets=(-1.0, 1.0),
    )
    names = {"vcpo_weight_nats_bucket", "vcpo_weight_nats_count"}
    assert compare(ALL | names, (*DECLARED, weights)) == compare(ALL, DECLARED)
    assert compare(ALL | names | {"vcpo_weight_nats_sum"}, (*DECLARED, weights)).undeclared
