"""Alarms are judged by when they come, on runs whose alarm and collapse are given."""

import pytest

from research.results.alarms import JUDGED_LEVELS, LOW_ESS, WatchedRun, alarm_qualities

COLLAPSE = 30


def run(alarm_at=None, *, collapse=COLLAPSE):
    alarms = dict.fromkeys([*JUDGED_LEVELS, LOW_ESS]) | {"warn": alarm_at}
    return WatchedRun(lag=8, first_alarms=alarms, collapse=collapse)


def quality(*runs, name="warn"):
    return alarm_qualities(runs)[name]


def test_the_lead_is_counted_from_the_alarm_to_the_collapse():
    assert quality(run(12)).lead_steps == 18


def test_the_lead_of_several_runs_is_their_median():
    assert quality(run(5), run(10), run(29)).lead_steps == 20


@pytest.mark.parametrize("alarm_at", [None, 30, 35], ids=["never", "too late", "far too late"])
def test_a_collapse_without_a_warning_before_it_has_no_lead(alarm_at):
    found = quality(run(alarm_at))
    assert (found.num_collapses, found.num_warned, found.lead_steps) == (1, 0, 0)


def test_alarms_in_runs_that_hold_are_false():
    runs = [run(at, collapse=None) for at in (12, None, None, None)]
    assert quality(*runs).false_alarm_rate == 0.25


def test_without_runs_of_a_kind_there_is_no_figure():
    assert quality(run(collapse=None)).lead_steps is None
    assert quality(run(12)).false_alarm_rate is None


def test_each_alarm_is_judged_by_its_own_steps():
    assert quality(run(12), name="critical").num_warned == 0
