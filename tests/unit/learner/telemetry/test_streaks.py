"""Steps in a row in trouble: begun, counted on, and ended."""

from __future__ import annotations

import pytest

from tests.fixtures.records import step_record
from vcpo.algo.health.early_warning import WarningLevel
from vcpo_learner.telemetry.streaks import streak_fields, window_fields

WELL = {"level": WarningLevel.OK, "has_collapsed": False, "skipped": None, "lag_limit_steps": 8}


def streaks(before=None, **changes):
    return streak_fields(before, **{**WELL, "max_policy_lag_steps": 8, **changes})


def test_a_run_that_is_well_counts_nothing():
    before = step_record(critical_steps=4, collapsed_steps=3, throttled_steps=9, skipped_steps=2)
    assert set(streaks(before).values()) == {0}
    assert set(streaks().values()) == {0}


@pytest.mark.parametrize(
    ("field", "trouble"),
    [
        ("critical_steps", {"level": WarningLevel.CRITICAL}),
        ("critical_steps", {"level": WarningLevel.DEAD}),
        ("collapsed_steps", {"has_collapsed": True}),
        ("throttled_steps", {"lag_limit_steps": 4}),
        ("skipped_steps", {"skipped": "low_ess"}),
    ],
)
def test_a_step_in_trouble_is_the_first_or_one_more(field, trouble):
    assert streaks(**trouble)[field] == 1
    before = step_record(**{"lag_limit_steps": 4, field: 6})
    assert streaks(before, **trouble)[field] == 7


def test_a_limit_that_rises_is_a_recovery():
    before = step_record(lag_limit_steps=3, throttled_steps=30)
    assert streaks(before, lag_limit_steps=4)["throttled_steps"] == 0
    assert streaks(before, lag_limit_steps=2)["throttled_steps"] == 31


def test_a_warning_is_not_critical():
    assert streaks(level=WarningLevel.WARN)["critical_steps"] == 0


def test_a_step_usually_takes_the_mean_of_the_last_ones_with_their_waits():
    last = [step_record(step_s=2.0, idle_s=1.0), step_record(step_s=4.0, idle_s=0.0)]
    taken = window_fields(last, ess_ratio=0.5, step_s=4.0, idle_s=1.0)
    assert taken["step_interval_s"] == (3.0 + 4.0 + 5.0) / 3
    first = window_fields([], ess_ratio=0.5, step_s=900.0, idle_s=60.0)
    assert first["step_interval_s"] == 960.0


def test_the_ess_ratio_is_a_mean_and_a_low_tenth_of_ten_steps_that_have_one():
    def means(*ratios):
        found = window_fields(
            [step_record(ess_ratio=ratio) for ratio in ratios[:-1]],
            ess_ratio=ratios[-1],
            step_s=1.0,
            idle_s=0.0,
        )
        return found["ess_ratio_mean"], found["ess_ratio_low"]

    assert means(0.5, 0.1, 0.9, 0.7) == (pytest.approx(0.55), 0.1)
    assert means(0.01, *[0.5] * 10) == (0.5, 0.5)
    assert means(0.0, 0.5, 0.0) == (0.5, 0.5)
    assert means(0.0) == (None, None)
