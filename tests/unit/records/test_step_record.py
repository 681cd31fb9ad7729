"""What the step record declares can be found where it says."""

from __future__ import annotations

from dataclasses import fields

from vcpo.algo.health.diagnostics import BatchDiagnostics
from vcpo.metrics.step_gauges import GAUGES
from vcpo.records.step_record import StepRecord, UpdateRecord, update_fields


def test_no_two_numbers_share_a_metric():
    names = [gauge.name for gauge in GAUGES]
    assert len(set(names)) == len(names)


def test_a_number_within_the_diagnostics_is_one_of_theirs():
    known = {each.name for each in fields(BatchDiagnostics)}
    assert {each.key for each in GAUGES if each.field == "diagnostics"} <= known


def test_a_step_holds_all_numbers_of_its_update():
    update = UpdateRecord(
        reward_mean=0.5, response_tokens_mean=12.0, on_policy_ess_ratio=0.9, skipped="low_ess"
    )
    around = dict.fromkeys(each.name for each in fields(StepRecord)) | {"step": 7}
    step = StepRecord(**{**around, **update_fields(update)})
    assert (step.step, step.reward_mean, step.skipped) == (7, 0.5, "low_ess")
    assert update_fields(step) == update_fields(update)
