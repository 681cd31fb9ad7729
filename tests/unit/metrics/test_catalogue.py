"""Metrics are declared by the rules of Prometheus, and exported as their part promises."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.monitoring.catalogue import ALL, PARTS
from vcpo.metrics import LearnerMetrics, RolloutMetrics
from vcpo.metrics.learner import lag_edges
from vcpo.records.reasons import DropReason

UNBOUNDED = {"uid", "step", "id", "trajectory", "lease", "worker", "pod", "error", "message"}
NOT_BASE_UNITS = {"ms", "milliseconds", "minutes", "hours", "kb", "mb", "percent"}


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_a_metric_has_a_name_by_the_rules_one_sentence_and_bounded_labels(metric):
    assert re.fullmatch(r"vcpo(_[a-z][a-z0-9]*)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not set(metric.name.split("_")) & NOT_BASE_UNITS
    assert not re.search(r"_(bucket|sum|count|created)$", metric.name)
    assert re.fullmatch(r"[A-Z0-9][^\n]{9,118}\.", metric.help)
    assert not set(metric.labels) & UNBOUNDED


def test_every_name_is_declared_once():
    assert len({each.name for each in ALL}) == len(ALL)


def test_a_host_says_which_run_it_speaks_of():
    assert [each.name for each in PARTS["host"] if each.labels[:2] != ("namespace", "run")] == []


def learner() -> LearnerMetrics:
    return LearnerMetrics(run="countdown")


def test_every_series_of_a_rollout_worker_carries_run_and_group():
    families = RolloutMetrics(run="countdown", group="main").registry.collect()
    labels = [each.labels for family in families for each in family.samples]
    assert {(each["run"], each["group"]) for each in labels} == {("countdown", "main")}


def test_process_and_platform_are_exported_too():
    value = learner().registry.get_sample_value
    assert value("process_resident_memory_bytes", {"run": "countdown"}) > 0
    assert "python_info" in {family.name for family in learner().registry.collect()}


def test_what_nobody_measured_is_absent_rather_than_zero():
    metrics = learner()
    labels = {"run": "countdown"}
    assert metrics.registry.get_sample_value("vcpo_ess_ratio", labels) is None
    metrics.last_step["vcpo_ess_ratio"].set(0.0)
    assert metrics.registry.get_sample_value("vcpo_ess_ratio", labels) == 0.0


def test_counters_are_there_from_the_start_for_each_value_of_their_labels():
    value = learner().registry.get_sample_value
    assert value("vcpo_accounting_errors_total", {"run": "countdown"}) == 0.0
    shown = {
        reason: value("vcpo_trajectories_dropped_total", {"run": "countdown", "reason": reason})
        for reason in DropReason
    }
    assert shown == dict.fromkeys(DropReason, 0.0)


def test_a_lag_at_an_edge_is_in_the_bucket_below_it():
    metrics = learner()
    metrics.policy_lag_steps.observe(2)
    cumulative = {
        bound: metrics.registry.get_sample_value(
            "vcpo_policy_lag_steps_bucket", {"run": "countdown", "le": bound}
        )
        for bound in ("1.0", "2.0", "+Inf")
    }
    assert cumulative == {"1.0": 0.0, "2.0": 1.0, "+Inf": 1.0}


@given(st.integers(0, 1024))
def test_lags_have_few_whole_buckets_up_to_the_bound_with_every_limit_that_halving_reaches(bound):
    edges = lag_edges(bound)
    assert list(edges) == sorted({int(edge) for edge in edges})
    assert (edges[0], edges[-1]) == (0, bound)
    assert len(edges) <= 12
    assert {bound >> halvings for halvings in range(11)} <= set(edges)


def test_two_sets_in_one_process_share_nothing():
    one, other = learner(), learner()
    one.steps.inc()
    value = other.registry.get_sample_value("vcpo_learner_steps_total", {"run": "countdown"})
    assert value == 0.0
