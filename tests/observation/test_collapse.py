"""The judgement of a collapse, on histories written by hand."""

from __future__ import annotations

from typing import Any

from tests.fixtures.records import evaluation_record, step_record
from tests.observation.collapse import (
    critical_to_throttle_steps,
    due_alerts,
    first_critical_step,
    has_recovered,
    steps_on_older_data,
)
from vcpo.records.step_record import StepRecord

BOUND = 8


def history(*rows: tuple[str, int, int]) -> list[StepRecord]:
    """Steps 1, 2 ... of (level of the early warning, admission lag, largest lag of a token)."""
    return [
        step_record(step=number, warning_level=level, lag_limit_steps=limit, lag_max=lag)
        for number, (level, limit, lag) in enumerate(rows, start=1)
    ]


def evaluated(*accuracies: float) -> list[Any]:
    """Evaluations at steps 0, 1, 2 ..."""
    return [
        evaluation_record(step=step, accuracy=each, num_trajectories=256)
        for step, each in enumerate(accuracies)
    ]


def test_steps_are_counted_from_the_first_critical_warning_to_the_first_tightened_batch():
    steps = history(("ok", 8, 8), ("critical", 8, 8), ("warn", 8, 8), ("dead", 4, 4))
    assert first_critical_step(steps) == 2
    assert critical_to_throttle_steps(steps, BOUND) == 2


def test_a_limit_that_was_tightened_before_the_warning_took_no_steps():
    assert critical_to_throttle_steps(history(("warn", 4, 4), ("critical", 4, 4)), BOUND) == 0


def test_without_a_warning_or_without_a_throttle_there_is_no_number_of_steps():
    assert critical_to_throttle_steps(history(("critical", 8, 8)), BOUND) is None
    assert critical_to_throttle_steps(history(("warn", 4, 4)), BOUND) is None


def test_steps_on_older_data_are_those_under_the_limit_with_a_token_beyond_it():
    steps = history(
        ("critical", 8, 8), ("dead", 4, 8), ("dead", 4, 5), ("dead", 2, 3), ("ok", 5, 5)
    )
    assert steps_on_older_data(steps, BOUND) == 2
    assert steps_on_older_data(history(("critical", 8, 8)), BOUND) == 0


def test_a_run_has_recovered_at_eight_tenths_of_its_best_before_the_warning():
    steps = history(("ok", 8, 8), ("critical", 8, 8), ("dead", 4, 4), ("ok", 4, 4))
    assert has_recovered(steps, evaluated(0.3, 0.5, 0.4, 0.0, 0.5, 0.3, 0.5))
    assert not has_recovered(steps, evaluated(0.3, 0.5, 0.4, 0.9, 0.4, 0.3, 0.4))


def test_a_run_that_was_never_critical_has_nothing_to_recover_from():
    assert has_recovered(history(("warn", 8, 8)), evaluated(0.5, 0.1))


def test_an_alert_is_due_once_its_steps_in_a_row_lasted_for_a_scrape():
    def after(**fields: Any) -> set[str]:
        return due_alerts([step_record(step=1), step_record(step=2, **fields)])

    assert after(critical_steps=5, collapsed_steps=12) == set()
    assert after(critical_steps=6) == {"VCPOCollapseWarning"}
    assert after(collapsed_steps=13) == {"VCPORewardCollapsed"}


def test_two_low_evaluations_in_a_row_are_due_before_the_last_one_which_nobody_sees():
    steps = [step_record(step=1)]
    assert due_alerts(steps, evaluated(0.72, 0.41, 0.43)) == set()
    assert due_alerts(steps, evaluated(0.72, 0.41, 0.43, 0.7)) == {"VCPOEvaluationFalling"}


def test_a_rate_of_a_quarter_is_due_after_three_steps():
    steps = [step_record(step=step, learning_rate_backoff=0.25) for step in (1, 2, 3)]
    assert due_alerts(steps[:2]) == set()
    assert due_alerts(steps) == {"VCPOLearningRateBackedOff"}
