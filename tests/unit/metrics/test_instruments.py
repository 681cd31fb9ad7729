"""Each part exports its list of the catalogue, under its labels, and nothing invented."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from vcpo.metrics import (
    HostMetrics,
    LearnerMetrics,
    Metric,
    OperatorMetrics,
    RolloutMetrics,
    catalogue,
)
from vcpo.records.reasons import DropReason


def learner() -> LearnerMetrics:
    return LearnerMetrics(run="countdown")


def rollout() -> RolloutMetrics:
    return RolloutMetrics(run="countdown", group="main")


def families(registry: CollectorRegistry) -> dict[str, tuple[str, str]]:
    """Type and help by name, as queried, of what is the project's own."""
    suffix = {"counter": "_total"}
    return {
        family.name + suffix.get(family.type, ""): (family.type, family.documentation)
        for family in registry.collect()
        if family.name.startswith("vcpo_")
    }


@pytest.mark.parametrize(
    ("part", "listed"),
    [
        pytest.param(learner, (*catalogue.SERVER, *catalogue.LEARNER), id="learner"),
        pytest.param(rollout, catalogue.ROLLOUT, id="rollout"),
        pytest.param(HostMetrics, catalogue.HOST, id="host"),
        pytest.param(OperatorMetrics, (*catalogue.HOST, *catalogue.OPERATOR), id="operator"),
    ],
)
def test_a_part_exports_exactly_its_list(part, listed: tuple[Metric, ...]):
    expected = {each.name: (each.kind.value, each.help) for each in (catalogue.BUILD_INFO, *listed)}
    assert families(part().registry) == expected


def test_a_worker_exports_numbers_of_its_engine_only_where_the_engine_has_them():
    metrics = rollout()
    names = {each.name for each in catalogue.ROLLOUT_ENGINE}
    assert not names & set(families(metrics.registry))
    metrics.engine()
    assert names <= set(families(metrics.registry))


def test_every_series_of_a_rollout_worker_carries_run_and_group():
    samples = [each for family in rollout().registry.collect() for each in family.samples]
    assert {(each.labels["run"], each.labels["group"]) for each in samples} == {
        ("countdown", "main")
    }


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


def test_counters_are_there_from_the_start():
    value = learner().registry.get_sample_value
    assert value("vcpo_accounting_errors_total", {"run": "countdown"}) == 0.0


def test_a_counter_with_closed_labels_is_there_from_the_start_for_each_of_their_values():
    value = learner().registry.get_sample_value
    shown = {
        reason: value("vcpo_trajectories_dropped_total", {"run": "countdown", "reason": reason})
        for reason in DropReason
    }
    assert shown == dict.fromkeys(DropReason, 0.0)


def test_a_counter_with_an_open_label_is_there_from_its_first_event():
    metrics = OperatorMetrics()
    assert metrics.recreated.collect()[0].samples == []
    metrics.recreated.labels("Service").inc()
    assert metrics.registry.get_sample_value("vcpo_operator_recreated_total", {"kind": "Service"})


def test_a_drop_is_counted_under_its_reason():
    metrics = learner()
    metrics.dropped.labels("stale").inc(3)
    labels = {"run": "countdown", "reason": "stale"}
    assert metrics.registry.get_sample_value("vcpo_trajectories_dropped_total", labels) == 3.0


def test_a_lag_of_two_falls_into_the_bucket_up_to_two():
    metrics = learner()
    metrics.policy_lag_steps.observe_all([2])
    cumulative = {
        bound: metrics.registry.get_sample_value(
            "vcpo_policy_lag_steps_bucket", {"run": "countdown", "le": bound}
        )
        for bound in ("1.0", "2.0", "+Inf")
    }
    assert cumulative == {"1.0": 0.0, "2.0": 1.0, "+Inf": 1.0}


def test_two_sets_in_one_process_share_nothing():
    one, other = learner(), learner()
    one.steps.inc()
    value = other.registry.get_sample_value("vcpo_learner_steps_total", {"run": "countdown"})
    assert value == 0.0
