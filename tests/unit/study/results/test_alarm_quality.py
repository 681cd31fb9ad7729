"""Alarms are judged by when they come, on runs whose levels and evaluations are given."""

import pytest

from tests.fixtures.study import evaluations
from vcpo.algo import WarningLevel
from vcpo_study.results.alarms import WatchedRun, judge_alarms

OK, WARN, CRITICAL = WarningLevel.OK, WarningLevel.WARN, WarningLevel.CRITICAL
HOLDING = evaluations(0.4, 0.9, 0.9, 0.9)
FALLING = evaluations(0.4, 0.9, 0.9, 0.1)
"""Evaluated at the steps 0, 10, 20 and 30."""


def run(performance, *, alarm_at=None, level=WARN):
    levels = tuple((step, level if step == alarm_at else OK) for step in range(1, 41))
    return WatchedRun(levels=levels, evaluations=performance)


def test_the_lead_is_counted_from_the_alarm_to_the_collapse():
    assert judge_alarms([run(FALLING, alarm_at=12)]).lead_steps == 18


def test_the_lead_of_several_runs_is_their_median():
    runs = [run(FALLING, alarm_at=step) for step in (5, 10, 29)]
    assert judge_alarms(runs).lead_steps == 20


@pytest.mark.parametrize("alarm_at", [None, 30, 35], ids=["never", "too late", "far too late"])
def test_a_collapse_without_a_warning_before_it_has_no_lead(alarm_at):
    found = judge_alarms([run(FALLING, alarm_at=alarm_at)])
    assert (found.num_collapses, found.num_warned, found.lead_steps) == (1, 0, 0)


def test_alarms_in_runs_that_hold_are_false():
    runs = [run(HOLDING, alarm_at=12), run(HOLDING), run(HOLDING), run(HOLDING)]
    assert judge_alarms(runs).false_alarm_rate == 0.25


def test_without_runs_of_a_kind_there_is_no_figure():
    assert judge_alarms([run(HOLDING)]).lead_steps is None
    assert judge_alarms([run(FALLING)]).false_alarm_rate is None


def test_only_levels_as_bad_as_asked_for_are_alarms():
    runs = [run(HOLDING, alarm_at=12)]
    assert judge_alarms(runs, at_least=CRITICAL).false_alarm_rate == 0.0
