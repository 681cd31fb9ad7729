"""The catalogue's names follow the rules of Prometheus."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from vcpo.metrics import Metric, MetricKind, catalogue
from vcpo.metrics.metric import Label, unit_in_name
from vcpo.records.step_chart import Unit

Rule = Callable[[Metric], bool]

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
NOT_BASE_UNITS = {"ms", "milliseconds", "minutes", "hours", "kb", "mb", "kilobytes", "percent"}


def is_lower_snake_case_with_the_prefix(metric: Metric) -> bool:
    return bool(re.fullmatch(r"vcpo(_[a-z][a-z0-9]*)+", metric.name))


def ends_in_total_if_and_only_if_it_is_a_counter(metric: Metric) -> bool:
    return metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)


def is_named_in_base_units_and_without_its_type(metric: Metric) -> bool:
    return not set(metric.name.split("_")) & (NOT_BASE_UNITS | {kind.value for kind in MetricKind})


def names_its_unit(metric: Metric) -> bool:
    stated = unit_in_name(metric.name)
    return metric.unit is stated or stated is Unit.COUNT


def leaves_the_suffixes_of_histograms_to_the_client(metric: Metric) -> bool:
    return not re.search(r"_(bucket|sum|count|created)$", metric.name)


def is_described_by_one_short_sentence(metric: Metric) -> bool:
    return bool(re.fullmatch(r"[A-Z0-9][^\n]{9,118}\.", metric.help))


def has_labels_of_bounded_words(metric: Metric) -> bool:
    names = metric.label_names
    words = all(re.fullmatch(r"[a-z]+", name) for name in names)
    return words and len(set(names)) == len(names) and not set(names) & UNBOUNDED


def has_ascending_buckets_if_and_only_if_it_is_a_histogram(metric: Metric) -> bool:
    ascending = list(metric.buckets) == sorted(set(metric.buckets))
    return ascending and bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)


def waits_for_a_first_value_only_as_a_gauge_without_labels(metric: Metric) -> bool:
    return not metric.absent_until_set or (metric.kind, metric.labels) == (MetricKind.GAUGE, ())


GAUGE = Metric(
    name="vcpo_queue_tokens",
    kind=MetricKind.GAUGE,
    help="Tokens that wait in the queue.",
    unit=Unit.TOKENS,
)
COUNTEREXAMPLES: list[tuple[Rule, Metric]] = [
    (is_lower_snake_case_with_the_prefix, replace(GAUGE, name="queue_tokens")),
    (is_lower_snake_case_with_the_prefix, replace(GAUGE, name="vcpo_Queue")),
    (ends_in_total_if_and_only_if_it_is_a_counter, replace(GAUGE, name="vcpo_tokens_total")),
    (ends_in_total_if_and_only_if_it_is_a_counter, replace(GAUGE, kind=MetricKind.COUNTER)),
    (is_named_in_base_units_and_without_its_type, replace(GAUGE, name="vcpo_wait_ms")),
    (is_named_in_base_units_and_without_its_type, replace(GAUGE, name="vcpo_queue_gauge")),
    (leaves_the_suffixes_of_histograms_to_the_client, replace(GAUGE, name="vcpo_queue_count")),
    (is_described_by_one_short_sentence, replace(GAUGE, help="tokens")),
    (names_its_unit, replace(GAUGE, unit=Unit.SECONDS)),
    (has_labels_of_bounded_words, replace(GAUGE, labels=(Label("run"), Label("worker")))),
    (has_labels_of_bounded_words, replace(GAUGE, labels=(Label("run"), Label("run")))),
    (has_ascending_buckets_if_and_only_if_it_is_a_histogram, replace(GAUGE, buckets=(1.0, 2.0))),
    (
        has_ascending_buckets_if_and_only_if_it_is_a_histogram,
        replace(GAUGE, kind=MetricKind.HISTOGRAM, buckets=(2.0, 1.0)),
    ),
    (
        waits_for_a_first_value_only_as_a_gauge_without_labels,
        replace(GAUGE, labels=(Label("run"),), absent_until_set=True),
    ),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _ in COUNTEREXAMPLES))
def test_every_metric(rule: Rule):
    assert len(catalogue.ALL) > 50
    assert [metric.name for metric in catalogue.ALL if not rule(metric)] == []


@pytest.mark.parametrize(("rule", "metric"), COUNTEREXAMPLES)
def test_a_rule_finds_who_breaks_it(rule: Rule, metric: Metric):
    assert not rule(metric)


def test_every_name_is_declared_once():
    assert len({each.name for each in catalogue.ALL}) == len(catalogue.ALL)


def test_a_host_says_which_run_it_speaks_of():
    wrong = [each.name for each in catalogue.HOST if each.label_names[:2] != ("namespace", "run")]
    assert wrong == []
