"""The early warning, judged on cells whose ESS ratio on policy is 0.8."""

from __future__ import annotations

from dataclasses import replace

from tests.fixtures.study import record
from tests.fixtures.study import steps as columns
from vcpo.algo import WarningLevel
from vcpo_study.results.alarms import (
    alarm_qualities,
    judge_alarms,
    low_ess_quality,
    watched_run,
)

COLLAPSING = (0.4, 0.9, 0.9, 0.9, 0.1)
HOLDING = (0.4, 0.9, 0.9, 0.9, 0.9)


def steps(*ratios, kl_per_token=0.2, on_policy=0.8):
    number = len(ratios)
    return columns(
        number,
        ess_ratio=ratios,
        on_policy_ess_ratio=(on_policy,) * number,
        ess=tuple(64 * ratio for ratio in ratios),
        kl_per_token=(kl_per_token,) * number,
    )


def alarm_quality(cells, at_least=WarningLevel.CRITICAL):
    return judge_alarms([watched_run(cell) for cell in cells], at_least=at_least)


def cell_of(rows, accuracies):
    return replace(record(accuracies=accuracies), steps=rows)


def test_the_lead_is_counted_from_the_alarm_to_the_collapse():
    # Two of ten steps at a tenth and far away are critical: at step 18 of a collapse at 40.
    rows = steps(*[0.8] * 16, 0.05, 0.05, *[0.8] * 22)
    found = alarm_quality([cell_of(rows, COLLAPSING)])
    assert (found.num_collapses, found.num_warned, found.lead_steps) == (1, 1, 22)


def test_steps_that_are_low_and_near_only_warn():
    rows = steps(*[0.8] * 6, *[0.1] * 3, *[0.8] * 31, kl_per_token=0.01)
    cells = [cell_of(rows, COLLAPSING)]
    assert alarm_quality(cells).lead_steps == 0
    assert alarm_quality(cells, WarningLevel.WARN).lead_steps == 31


def test_a_collapse_without_an_alarm_has_no_lead():
    assert alarm_quality([cell_of(steps(*[0.8] * 40), COLLAPSING)]).lead_steps == 0


def test_alarms_of_cells_that_hold_are_false():
    cells = [cell_of(steps(*[ratio] * 40), HOLDING) for ratio in (0.05, 0.8)]
    assert alarm_quality(cells).false_alarm_rate == 0.5


def test_a_skipped_step_without_weights_can_be_read():
    rows = columns(1, ess_ratio=(0.0,), ess=(None,), kl_per_token=(None,), gradient_norm=(0.0,))
    assert alarm_quality([cell_of(rows, HOLDING)]).num_collapses == 0


def test_a_low_ess_raises_its_alert_after_thirty_steps_in_a_row():
    # Below 0.3 of 0.8 from step 1, so the alert fires at step 30 of a collapse at 40.
    cells = [cell_of(steps(*[0.2] * 40), COLLAPSING)]
    assert low_ess_quality(cells).lead_steps == 10


def test_one_good_window_starts_the_count_of_low_steps_again():
    # Means of ten with one step at 0.8 are 0.26, above 0.24, so steps 20 to 29 are not low.
    rows = steps(*[0.2] * 19, 0.8, *[0.2] * 20)
    assert low_ess_quality([cell_of(rows, HOLDING)]).false_alarm_rate == 0.0
    assert low_ess_quality([cell_of(rows, HOLDING)], num_steps=19).false_alarm_rate == 1.0


def test_an_ess_that_is_as_low_on_policy_raises_nothing():
    rows = steps(*[0.2] * 40, on_policy=0.2)
    assert low_ess_quality([cell_of(rows, HOLDING)]).false_alarm_rate == 0.0


def test_all_alarms_are_judged_under_their_names():
    # All steps are at a sixteenth and far away, before a collapse at step 40. Three of them warn,
    # four are critical so early, and thirty raise the alert.
    found = alarm_qualities([cell_of(steps(*[0.05] * 40), COLLAPSING)])
    assert {name: each.lead_steps for name, each in found.items()} == {
        "warn": 37,
        "critical": 36,
        "low_ess": 10,
    }
