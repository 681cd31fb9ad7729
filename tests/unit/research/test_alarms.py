"""The early warning, judged on cells whose ESS ratio on policy is 0.8."""

from __future__ import annotations

from dataclasses import replace

import pytest

from research.alarms import JUDGED_LEVELS, LOW_ESS, WatchedRun, alarm_qualities, watched_run
from tests.fixtures.study import record
from tests.fixtures.study import steps as columns

COLLAPSING = (0.4, 0.9, 0.9, 0.9, 0.1)
HOLDING = (0.4, 0.9, 0.9, 0.9, 0.9)


def steps(*ratios, on_policy=0.8):
    number = len(ratios)
    return columns(
        number,
        ess_ratio=ratios,
        on_policy_ess_ratio=(on_policy,) * number,
        ess=tuple(64 * ratio for ratio in ratios),
    )


def cell_of(rows, accuracies):
    return replace(record(accuracies=accuracies), steps=rows)


def alarms(rows):
    return watched_run(cell_of(rows, HOLDING)).first_alarms


def test_a_collapse_is_told_by_its_step():
    rows = steps(*[0.8] * 40)
    assert watched_run(cell_of(rows, COLLAPSING)).collapse == 40
    assert watched_run(cell_of(rows, HOLDING)).collapse is None


def test_steps_that_are_low_on_average_are_critical():
    # After n steps at 0.1 the mean is about 0.1 + 0.9 * 0.8^n: 0.25 after 8 and 0.22 after 9.
    assert alarms(steps(*[0.8] * 16, *[0.08] * 24))["critical"] == 25


def test_few_low_steps_only_warn():
    assert alarms(steps(*[0.8] * 16, *[0.08] * 7, *[0.8] * 17))["warn"] == 23
    assert alarms(steps(*[0.8] * 16, *[0.08] * 7, *[0.8] * 17))["critical"] is None


def test_a_low_ess_raises_its_alert_after_thirty_steps_in_a_row():
    # Below 0.3 of 0.8 from step 1.
    assert alarms(steps(*[0.2] * 40))["low_ess"] == 30


def test_one_good_window_starts_the_count_of_low_steps_again():
    # Means of ten with one step at 0.8 are 0.26, above 0.24, so steps 20 to 29 are not low.
    assert alarms(steps(*[0.2] * 19, 0.8, *[0.2] * 20))["low_ess"] is None
    assert alarms(steps(*[0.2] * 19, 0.8, *[0.2] * 40))["low_ess"] == 59


def test_an_ess_that_is_as_low_on_policy_raises_nothing():
    assert alarms(steps(*[0.2] * 40, on_policy=0.2))["low_ess"] is None


COLLAPSE = 30


def run(alarm_at=None, *, collapse=COLLAPSE):
    alarms = dict.fromkeys([*JUDGED_LEVELS, LOW_ESS]) | {"warn": alarm_at}
    return WatchedRun(lag=8, first_alarms=alarms, collapse=collapse)


def quality(*runs, name="warn"):
    return alarm_qualities(runs)[name]


def test_the_lead_is_counted_from_the_alarm_to_the_collapse():
    assert quality(run(12)).lead_steps == 18


@pytest.mark.parametrize("alarm_at", [None, 30, 35], ids=["never", "too late", "far too late"])
def test_a_collapse_without_a_warning_before_it_has_no_lead(alarm_at):
    found = quality(run(alarm_at))
    assert (found.num_collapses, found.num_warned, found.lead_steps) == (1, 0, 0)


def test_alarms_in_runs_that_hold_are_false():
    runs = [run(at, collapse=None) for at in (12, None, None, None)]
    assert quality(*runs).false_alarm_rate == 0.25
