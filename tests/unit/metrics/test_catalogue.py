"""The catalogue's names follow the rules of Prometheus, so that nobody has to guess a unit."""

from __future__ import annotations

import re

import pytest

from vcpo.metrics import Kind, Metric, catalogue

UNBOUNDED = {
    "uid",
    "step",
    "id",
    "trajectory",
    "lease",
    "worker",
    "pod",
    "error",
    "message",
    "seed",
}
FOREIGN_UNITS = {"ms", "milliseconds", "minutes", "hours", "kb", "mb", "kilobytes", "percent"}

every_metric = pytest.mark.parametrize("metric", catalogue.ALL, ids=lambda metric: metric.name)


@every_metric
def test_name_is_lower_snake_case_with_the_prefix(metric: Metric):
    assert re.fullmatch(r"vcpo(_[a-z][a-z0-9]*)+", metric.name)


@every_metric
def test_counters_and_only_counters_end_in_total(metric: Metric):
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)


@every_metric
def test_name_holds_base_units_and_no_type(metric: Metric):
    words = set(metric.name.split("_"))
    assert not words & (FOREIGN_UNITS | {kind.value for kind in Kind})


@every_metric
def test_name_leaves_the_suffixes_of_histograms_to_the_client(metric: Metric):
    assert not re.search(r"_(bucket|sum|count|created)$", metric.name)


@every_metric
def test_help_is_one_short_sentence(metric: Metric):
    assert re.fullmatch(r"[A-Z0-9][^\n]{9,118}\.", metric.help)


@every_metric
def test_labels_are_bounded_words(metric: Metric):
    assert len(set(metric.labels)) == len(metric.labels)
    assert not set(metric.labels) & UNBOUNDED
    assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)


@every_metric
def test_histograms_and_only_histograms_have_ascending_buckets(metric: Metric):
    assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))


@every_metric
def test_only_gauges_without_labels_wait_for_a_first_value(metric: Metric):
    if metric.absent_until_set:
        assert (metric.kind, metric.labels) == (Kind.GAUGE, ())


def test_every_constant_of_the_catalogue_is_in_exactly_one_list():
    constants = [value for value in vars(catalogue).values() if isinstance(value, Metric)]
    constants += catalogue.STEP_GAUGES.values()
    assert sorted(each.name for each in constants) == sorted(each.name for each in catalogue.ALL)
    assert len({each.name for each in catalogue.ALL}) == len(catalogue.ALL)


def test_lag_buckets_are_zero_and_the_powers_of_two_up_to_128():
    assert catalogue.POLICY_LAG.buckets == (0, 1, 2, 4, 8, 16, 32, 64, 128)


@pytest.mark.parametrize("metric", catalogue.HOST, ids=lambda metric: metric.name)
def test_a_host_says_which_run_it_speaks_of(metric: Metric):
    assert metric.labels[:2] == ("namespace", "run")
