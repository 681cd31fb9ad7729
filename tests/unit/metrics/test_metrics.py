"""What a host exports of a run is what it knows of the run now, and what it counted."""

import re
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.rules.promtool import needs_promtool, run_promtool
from tools.monitoring.catalogue import ALL, PARTS
from vcpo.api import VCPORunSpec, parse_run
from vcpo.control.conditions import ConditionType, Reason, condition
from vcpo.control.decision import ControlDecision
from vcpo.control.limits import lag_change
from vcpo.control.scaling import Direction
from vcpo.metrics import HostMetrics, LearnerMetrics, RolloutMetrics, serve_metrics
from vcpo.metrics.device_memory import device_memory
from vcpo.metrics.hosted_runs import HostedRun, HostedRuns, RunName, Workers
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


def test_the_brackets_of_an_ipv6_address_are_no_part_of_the_host():
    with serve_metrics(exercised_host().registry, "[127.0.0.1]", 0) as server:
        assert server.port


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


NAME: RunName = ("ml", "demo")
OTHER: RunName = ("ml", "other")


def spec_of(**fields: object) -> VCPORunSpec:
    least = {"model": {"name": "m"}, "environment": {"name": "countdown"}, "steps": 10}
    return parse_run(str({"metadata": {"name": "demo"}, "spec": {**least, **fields}})).spec


def decision(direction: Direction = Direction.HOLD, fed: Reason = Reason.BALANCED, lag: int = 8):
    conditions = (
        condition(ConditionType.SIGNALS_FRESH, Reason.FRESH),
        condition(ConditionType.LEARNER_FED, fed),
    )
    return ControlDecision(
        lag_limit_steps=lag,
        replicas={"main": 1},
        direction=direction,
        conditions=conditions,
        changes=(),
    )


RUN = HostedRun(
    spec=spec_of(),
    conditions=decision().conditions,
    workers={"main": Workers(desired=2, ready=1), "extra": Workers(desired=3, ready=3)},
    decision=decision(),
    lag_limit_steps=8,
    signals_age_s=1.5,
    start_s=1000.0,
    startup_deadline_s=2800.0,
)


class Host:
    """A host and what a Prometheus would read of it."""

    def __init__(self) -> None:
        self.metrics = HostMetrics()
        self.runs = HostedRuns(self.metrics)

    def samples(self, name: str, run: RunName = NAME) -> dict[tuple[str, ...], float]:
        """Values by the labels besides namespace and run."""
        return {
            tuple(each.labels.values())[2:]: each.value
            for family in self.metrics.registry.collect()
            for each in family.samples
            if each.name == name and tuple(each.labels.values())[:2] == run
        }

    def labels_of(self, run: RunName) -> list[str]:
        return [
            each.name
            for family in self.metrics.registry.collect()
            for each in family.samples
            if (each.labels.get("namespace"), each.labels.get("run")) == run
        ]


@pytest.fixture
def host() -> Host:
    return Host()


def test_a_runs_limits_are_those_of_its_spec(host: Host):
    spec = spec_of(
        steps=40,
        algorithm={"maxPolicyLagSteps": 12},
        control={"essFloorRatio": 0.25},
        checkpoint={"everySteps": 7},
    )
    host.runs.show(NAME, replace(RUN, spec=spec, lag_limit_steps=6))
    assert host.samples("vcpo_run_steps") == {(): 40.0}
    assert host.samples("vcpo_run_max_policy_lag_steps") == {(): 12.0}
    assert host.samples("vcpo_run_admission_lag_steps") == {(): 6.0}
    assert host.samples("vcpo_run_ess_floor_ratio") == {(): 0.25}
    assert host.samples("vcpo_run_checkpoint_interval_steps") == {(): 7.0}


def test_a_run_says_what_it_trains_how_and_whose_it_is(host: Host):
    labels = {"vcpo.dev/owner": "ada", "vcpo.dev/team": "nlp", "queue": "low"}
    host.runs.show(NAME, replace(RUN, spec=spec_of(algorithm={"method": "grpo"}), labels=labels))
    assert host.samples("vcpo_run_info") == {("m", "countdown", "grpo", "ada", "nlp"): 1.0}


def test_a_condition_is_one_at_its_status_and_zero_at_the_others(host: Host):
    host.runs.show(NAME, RUN)
    starving = condition(ConditionType.LEARNER_FED, Reason.AT_MAXIMUM)
    host.runs.show(NAME, replace(RUN, conditions=(starving,)))
    assert host.samples("vcpo_run_condition") == {
        ("LearnerFed", "True"): 0.0,
        ("LearnerFed", "False"): 1.0,
        ("LearnerFed", "Unknown"): 0.0,
    }


def test_what_is_unknown_or_over_is_absent(host: Host):
    host.runs.show(NAME, RUN)
    assert host.samples("vcpo_run_signals_age_seconds") == {(): 1.5}
    assert host.samples("vcpo_run_start_timestamp_seconds") == {(): 1000.0}
    assert host.samples("vcpo_run_startup_deadline_timestamp_seconds") == {(): 2800.0}
    host.runs.show(NAME, replace(RUN, signals_age_s=None, startup_deadline_s=None))
    assert host.samples("vcpo_run_signals_age_seconds") == {}
    assert host.samples("vcpo_run_startup_deadline_timestamp_seconds") == {}


def test_a_spec_that_cannot_be_used_changes_conditions_alone(host: Host):
    host.runs.show(NAME, RUN)
    refused = condition(ConditionType.SIGNALS_FRESH, Reason.MISSING)
    host.runs.show_conditions(NAME, (refused,))
    assert host.samples("vcpo_run_condition_reason") == {("SignalsFresh", "Missing"): 1.0}
    assert host.samples("vcpo_run_steps") == {(): 10.0}


def lag_decision(before: int, after: int) -> ControlDecision:
    changed = lag_change(before=before, after=after, reason="the ESS ratio is low", decided_s=0.0)
    return replace(decision(lag=after), changes=(changed,) if before != after else ())


def test_a_changed_lag_limit_is_counted_by_its_direction(host: Host):
    for before, after in ((8, 8), (8, 4), (4, 2), (2, 2), (2, 3)):
        host.runs.show(NAME, replace(RUN, decision=lag_decision(before, after)))
    assert host.samples("vcpo_run_throttles_total") == {("tighten",): 2.0, ("relax",): 1.0}


def test_a_decision_is_counted_once_though_its_conditions_are_shown_again(host: Host):
    host.runs.show(NAME, replace(RUN, decision=lag_decision(8, 4)))
    host.runs.show_conditions(NAME, RUN.conditions)
    assert host.samples("vcpo_run_throttles_total")["tighten",] == 1.0


def test_restarts_of_the_learner_never_decrease(host: Host):
    for total in (2, 2, 5, 0, 6):
        host.runs.show(NAME, replace(RUN, learner_restarts=total))
    assert host.samples("vcpo_run_learner_restarts_total") == {(): 6.0}


def test_a_deleted_run_leaves_nothing_and_takes_no_other(host: Host):
    for name in (NAME, OTHER):
        host.runs.show(name, RUN)
        host.runs.show(name, replace(RUN, lag_limit_steps=1, decision=lag_decision(8, 1)))
    others = host.labels_of(OTHER)
    host.runs.forget(NAME)
    assert host.labels_of(NAME) == []
    assert host.labels_of(OTHER) == others


def test_a_run_of_the_same_name_starts_over(host: Host):
    host.runs.show(NAME, replace(RUN, learner_restarts=3))
    host.runs.forget(NAME)
    host.runs.show(NAME, replace(RUN, learner_restarts=1, lag_limit_steps=2))
    assert host.samples("vcpo_run_learner_restarts_total") == {(): 1.0}
    assert host.samples("vcpo_run_throttles_total") == {("tighten",): 0.0, ("relax",): 0.0}


REASONS = (Reason.BALANCED, Reason.SCALING_UP, Reason.AT_MAXIMUM)
RUNS = st.builds(
    lambda method, groups, reason, age: replace(
        RUN,
        spec=spec_of(algorithm={"method": method}),
        workers={group: Workers(desired=1, ready=1) for group in groups},
        conditions=(condition(ConditionType.LEARNER_FED, reason),),
        signals_age_s=age,
    ),
    st.sampled_from(["vcpo", "grpo", "dapo"]),
    st.sets(st.sampled_from(["main", "extra", "gpu"])),
    st.sampled_from(REASONS),
    st.none() | st.floats(0, 100),
)


@given(st.lists(RUNS, min_size=1, max_size=6))
def test_gauges_depend_on_the_last_view_alone(views: list[HostedRun]):
    lived, fresh = Host(), Host()
    for view in views:
        lived.runs.show(NAME, view)
    fresh.runs.show(NAME, views[-1])
    for metric in (one for one in PARTS["host"] if one.kind == "gauge"):
        assert lived.samples(metric.name) == fresh.samples(metric.name)
