import pytest

from vcpo.algo import (
    WarningLevel,
    WatchedRun,
    alarm_step,
    collapse_step,
    evaluate_alarms,
)

OK, WARN, CRITICAL = WarningLevel.OK, WarningLevel.WARN, WarningLevel.CRITICAL
HOLDING = ((0, 0.4), (10, 0.9), (20, 0.9), (30, 0.9))
FALLING = ((0, 0.4), (10, 0.9), (20, 0.9), (30, 0.1))


def run(performance, *, alarm_at=None, level=WARN):
    levels = tuple((step, level if step == alarm_at else OK) for step in range(1, 41))
    return WatchedRun(levels=levels, performance=performance)


def test_a_collapse_is_half_of_the_best_before_it():
    assert collapse_step([(0, 0.9), (10, 0.45), (20, 0.44)]) == 20


def test_a_run_that_never_was_good_does_not_collapse():
    assert collapse_step([(0, 0.1), (10, 0.2), (20, 0.1)]) is None


def test_the_lead_is_counted_from_the_alarm_to_the_collapse():
    assert evaluate_alarms([run(FALLING, alarm_at=12)]).lead_steps == 18


def test_the_lead_of_several_runs_is_their_median():
    runs = [run(FALLING, alarm_at=step) for step in (5, 10, 29)]
    assert evaluate_alarms(runs).lead_steps == 20


@pytest.mark.parametrize("alarm_at", [None, 30, 35], ids=["never", "too late", "far too late"])
def test_a_collapse_without_a_warning_before_it_has_no_lead(alarm_at):
    found = evaluate_alarms([run(FALLING, alarm_at=alarm_at)])
    assert (found.num_collapses, found.num_warned, found.lead_steps) == (1, 0, 0)


def test_alarms_in_runs_that_hold_are_false():
    runs = [run(HOLDING, alarm_at=12), run(HOLDING), run(HOLDING), run(HOLDING)]
    assert evaluate_alarms(runs).false_alarm_rate == 0.25


def test_without_runs_of_a_kind_there_is_no_figure():
    assert evaluate_alarms([run(HOLDING)]).lead_steps is None
    assert evaluate_alarms([run(FALLING)]).false_alarm_rate is None


def test_only_levels_as_bad_as_asked_for_are_alarms():
    runs = [run(HOLDING, alarm_at=12)]
    assert evaluate_alarms(runs, at_least=CRITICAL).false_alarm_rate == 0.0


def test_a_sustained_alarm_is_held_without_a_gap():
    levels = list(enumerate([WARN, WARN, OK, WARN, CRITICAL, WARN], start=1))
    assert alarm_step(levels, at_least=WARN, sustained_steps=3) == 6
    assert alarm_step(levels, at_least=WARN, sustained_steps=4) is None


def test_an_alarm_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="sustained_steps is 0"):
        evaluate_alarms([run(HOLDING)], sustained_steps=0)
