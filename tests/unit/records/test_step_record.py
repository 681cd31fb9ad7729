"""What the step record declares can be found where it says."""

from __future__ import annotations

from dataclasses import fields

from vcpo.algo.health.diagnostics import BatchDiagnostics
from vcpo.records.step_record import (
    CHARTS,
    GAUGES,
    SIGNALS,
    StepRecord,
    UpdateRecord,
    update_fields,
)
from vcpo.wire.v1 import control_pb2


def test_no_two_numbers_share_a_metric():
    names = [gauge.name for _, gauge in GAUGES]
    assert len(set(names)) == len(names)


def test_a_number_within_the_diagnostics_is_one_of_theirs():
    entries = {gauge.entry for field, gauge in GAUGES if field == "diagnostics"}
    assert entries <= {each.name for each in fields(BatchDiagnostics)}
    others = {gauge.entry for field, gauge in GAUGES if field not in {"diagnostics", "mismatch"}}
    assert others == {None}


def test_a_chart_within_the_diagnostics_is_one_of_theirs():
    entries = {chart.entry for field, chart in CHARTS if field == "diagnostics"}
    assert entries <= {each.name for each in fields(BatchDiagnostics)}
    assert {chart.entry for field, chart in CHARTS if field != "diagnostics"} == {None}


def test_a_signal_is_a_field_of_the_message():
    names = {name for name, _ in SIGNALS}
    assert names <= set(control_pb2.Signals.DESCRIPTOR.fields_by_name)


def test_a_step_holds_all_numbers_of_its_update():
    update = UpdateRecord(
        reward_mean=0.5, response_tokens_mean=12.0, on_policy_ess_ratio=0.9, skipped="low_ess"
    )
    around = dict.fromkeys(each.name for each in fields(StepRecord)) | {"step": 7}
    step = StepRecord(**{**around, **update_fields(update)})
    assert (step.step, step.reward_mean, step.skipped) == (7, 0.5, "low_ess")
    assert update_fields(step) == update_fields(update)
