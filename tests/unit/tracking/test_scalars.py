"""The numbers that tracking services get."""

from __future__ import annotations

import dataclasses

import pytest

from tests.fixtures.records import STEP
from vcpo.metrics import catalogue
from vcpo.records.step_record import GAUGES, StepRecord
from vcpo.tracking.scalars import step_scalars

WEIGHED = dataclasses.replace(
    STEP,
    ess_ratio=0.4,
    on_policy_ess_ratio=0.8,
    learning_rate_scale=0.5,
    skipped=None,
    diagnostics={gauge.entry: 0.5 for name, gauge in GAUGES if name == "diagnostics"},
    mismatch={
        **{gauge.entry: 0.5 for name, gauge in GAUGES if name == "mismatch"},
        "by_engine": {"hf": 0.02},
        "by_position": {"64": 0.03},
    },
    **{field: 0.5 for field, gauge in GAUGES if getattr(STEP, field) is None},
)
WORDS = {"ess_kind", "warning_level", "skipped", "time_unix_s", "diagnostics", "mismatch"}
"""Fields that are no number of a step, or whose numbers are gauges."""


def test_every_number_of_a_step_is_sent():
    filled = {
        each.name: 0.123 + number / 1000
        for number, each in enumerate(dataclasses.fields(StepRecord))
        if each.name not in WORDS and isinstance(getattr(WEIGHED, each.name), float | int | None)
    }
    record = dataclasses.replace(WEIGHED, **filled)
    sent = set(step_scalars(record).values())
    assert {name for name, value in filled.items() if value not in sent} == set()


def test_names_are_those_of_the_metrics_in_groups():
    metrics = {metric.name.removeprefix("vcpo_") for metric in catalogue.ALL}
    gauges = {gauge.name.removeprefix("vcpo_") for _, gauge in GAUGES}
    sent = {name.partition("/")[2].split("/")[0] for name in step_scalars(WEIGHED)}
    assert gauges - sent == set()
    no_metrics = {"relative_ess_ratio", "token_lag_mean_steps", "learner_idle_seconds",
                  "response_tokens_mean", "step_skipped",
                  "learner_ranks", "adapter_swaps_total", "merged_versions_total",
                  "learner_peak_gibibytes", "worker_peak_gibibytes",
                  "prompt_tokens_mean", "prompt_tokens_max"}  # fmt: skip
    assert sent - metrics == no_metrics
    groups = {name.partition("/")[0] for name in step_scalars(WEIGHED)}
    assert groups == {"task", "learner", "off_policy", "rollout"}


def test_parts_of_the_reward_are_sent_by_names_that_every_service_takes():
    record = dataclasses.replace(WEIGHED, reward_parts={"form.short": 0.5, "exact (2)": 0.25})
    sent = step_scalars(record)
    assert sent["task/reward_part/form.short"] == 0.5
    assert sent["task/reward_part/exact _2_"] == 0.25


def test_the_mismatch_is_sent_by_engine_and_by_position():
    sent = step_scalars(WEIGHED)
    assert sent["off_policy/mismatch_engine_nats/hf"] == 0.02
    assert sent["off_policy/mismatch_position_nats/64"] == 0.03


def test_the_ess_is_sent_also_relative_to_that_of_on_policy_data():
    sent = step_scalars(WEIGHED)
    assert sent["off_policy/relative_ess_ratio"] == pytest.approx(0.5)
    assert sent["off_policy/ess_ratio"] == 0.4


def test_a_skipped_step_has_no_learning_rate_and_one_without_weights_no_ess():
    skipped = step_scalars(dataclasses.replace(WEIGHED, skipped="no_gradient"))
    assert "off_policy/learning_rate_scale_ratio" not in skipped
    assert skipped["learner/step_skipped"] == 1.0
    weightless = step_scalars(dataclasses.replace(WEIGHED, ess_ratio=0.0))
    assert {"off_policy/ess_ratio", "off_policy/relative_ess_ratio"}.isdisjoint(weightless)


def test_buckets_and_reasons_are_parts_of_the_name():
    record = dataclasses.replace(WEIGHED, ess_by_lag={"4": 0.25}, dropped={"stale": 3})
    sent = step_scalars(record)
    assert sent["off_policy/lag_ess_ratio/4"] == 0.25
    assert sent["rollout/trajectories_dropped_total/stale"] == 3
