"""The early warning, on steps whose ESS ratio on policy is 0.8: the threshold is 0.24."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.study.scenes import record, step_row
from vcpo_study.alarms import alarm_quality, warning_step

COLLAPSING = (0.4, 0.9, 0.9, 0.9, 0.1)
HOLDING = (0.4, 0.9, 0.9, 0.9, 0.9)


def steps(*ratios):
    rows = enumerate(ratios, start=1)
    return tuple(step_row(step, ess_ratio=r, on_policy_ess_ratio=0.8) for step, r in rows)


def cell_of(rows, accuracies):
    return replace(record(accuracies=accuracies), steps=rows)


def test_a_healthy_cell_gives_no_warning():
    assert warning_step(steps(*[0.25] * 30)) is None


def test_the_warning_comes_when_more_than_half_of_ten_steps_are_low():
    # Low from step 21 on; of steps 17..26 six are low, and the median is.
    assert warning_step(steps(*[0.8] * 20, *[0.1] * 20)) == 26


def test_a_few_bad_steps_are_no_warning():
    assert warning_step(steps(*[0.8] * 10, *[0.01] * 4, *[0.8] * 10)) is None


def test_too_few_steps_warn_of_nothing():
    assert warning_step(steps(*[0.01] * 9)) is None


def test_the_lead_is_counted_from_the_warning_to_the_collapse():
    cell = cell_of(steps(*[0.1] * 40), COLLAPSING)
    assert alarm_quality([cell]).lead_steps == 30  # warned at step 10, collapsed at step 40


def test_a_collapse_without_a_warning_has_no_lead():
    cell = cell_of(steps(*[0.8] * 40), COLLAPSING)
    assert alarm_quality([cell]).lead_steps == 0


def test_warnings_of_cells_that_hold_are_false_alarms():
    cells = [cell_of(steps(*[ratio] * 40), HOLDING) for ratio in (0.1, 0.8)]
    assert alarm_quality(cells).false_alarm_rate == 0.5
