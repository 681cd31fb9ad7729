from __future__ import annotations

import re
import urllib.request
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.rules.promtool import needs_promtool, run_promtool
from tools.monitoring.catalogue import ALL, PARTS
from vcpo.control.conditions import ConditionType, Reason, condition
from vcpo.metrics import HostMetrics, LearnerMetrics, RolloutMetrics, serve_metrics
from vcpo.metrics.device_memory import device_memory
from vcpo.metrics.hosted_runs import HostedRun, HostedRuns
from vcpo.metrics.label_values import MemoryState
from vcpo.metrics.learner import lag_edges
from vcpo.records.reasons import DropReason

ALLOCATOR = SimpleNamespace(
    memory_reserved=lambda device: 30 + device.index,
    max_memory_allocated=lambda device: 20 + device.index,
    get_device_properties=lambda device: SimpleNamespace(total_memory=80 + device.index),
)


def test_a_gpu_has_reserved_peak_and_total_memory():
    gpu = SimpleNamespace(type="cuda", index=1)
    assert device_memory(ALLOCATOR, gpu) == {
        MemoryState.RESERVED: 31,
        MemoryState.PEAK: 21,
        MemoryState.TOTAL: 81,
    }


def exercised_learner() -> LearnerMetrics:
    metrics = LearnerMetrics(run="countdown")
    metrics.last_step["vcpo_ess_ratio"].set(0.25)
    metrics.dropped.labels("stale").inc(2)
    metrics.step_duration_s.observe(0.3)
    return metrics


def exercised_rollout() -> RolloutMetrics:
    metrics = RolloutMetrics(run="countdown", group="main")
    metrics.samples.labels("accepted").inc()
    return metrics


def exercised_host() -> HostMetrics:
    metrics = HostMetrics()
    fresh = condition(ConditionType.SIGNALS_FRESH, Reason.FRESH)
    runs = HostedRuns(metrics)
    runs.show(("ml", "countdown"), HostedRun(conditions=(fresh,), lag_limit_steps=8))
    return metrics


def scrape(part: LearnerMetrics | RolloutMetrics | HostMetrics) -> str:
    with serve_metrics(part.registry, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.read().decode()


def values(text: str) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_gives_the_values_that_were_set():
    scraped = values(scrape(exercised_learner()))
    assert scraped["vcpo_ess_ratio"] == 0.25
    assert scraped["vcpo_trajectories_dropped_total"] == 2.0
    assert scraped["vcpo_learner_step_duration_seconds_count"] == 1.0


def test_a_taken_port_is_an_error():
    registry = exercised_host().registry
    with serve_metrics(registry, "127.0.0.1", 0) as server, pytest.raises(OSError, match="in use"):
        serve_metrics(registry, "127.0.0.1", server.port)


@needs_promtool
@pytest.mark.parametrize("part", [exercised_learner, exercised_rollout, exercised_host])
def test_promtool_finds_nothing_to_say(part):
    own = "\n".join(line for line in scrape(part()).splitlines() if "vcpo_" in line) + "\n"
    checked = run_promtool("check", "metrics", text=own)
    assert (checked.returncode, checked.stderr) == (0, "")


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


def test_a_host_says_which_run_it_speaks_of():
    assert [each.name for each in PARTS["host"] if each.labels[:2] != ("namespace", "run")] == []


def learner() -> LearnerMetrics:
    return LearnerMetrics(run="countdown")


def test_every_series_of_a_rollout_worker_carries_run_and_group():
    families = RolloutMetrics(run="countdown", group="main").registry.collect()
    labels = [each.labels for family in families for each in family.samples]
    assert {(each["run"], each["group"]) for each in labels} == {("countdown", "main")}


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


@given(st.integers(0, 1024))
def test_lags_have_few_whole_buckets_up_to_the_bound_with_every_limit_that_halving_reaches(bound):
    edges = lag_edges(bound)
    assert list(edges) == sorted({int(edge) for edge in edges})
    assert (edges[0], edges[-1]) == (0, bound)
    assert len(edges) <= 12
    assert {bound >> halvings for halvings in range(11)} <= set(edges)
