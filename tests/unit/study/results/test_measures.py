"""Measures of one cell, on evaluations at steps 0, 10, 20 and so on."""

from __future__ import annotations

import pytest

from tests.fixtures.study import evaluations
from vcpo_study.results.measures import collapse_step, deepest_fall, final_accuracy, steps_to


def test_the_final_accuracy_is_the_mean_of_the_last_three():
    assert final_accuracy(evaluations(0.1, 0.6, 0.9, 0.9)) == pytest.approx(0.8)


def test_fewer_evaluations_are_all_taken():
    assert final_accuracy(evaluations(0.2, 0.4)) == pytest.approx(0.3)


def test_no_evaluation_has_no_accuracy():
    with pytest.raises(ValueError, match="evaluations is empty"):
        final_accuracy(())


def test_steps_between_two_evaluations_are_interpolated():
    # From 0.4 at step 10 to 0.8 at step 20, half of the way is 0.6.
    assert steps_to(evaluations(0.1, 0.4, 0.8), 0.6) == pytest.approx(15.0)


def test_the_first_time_counts():
    assert steps_to(evaluations(0.0, 0.8, 0.1, 0.9), 0.8) == pytest.approx(10.0)


def test_a_target_reached_at_the_start_takes_no_step():
    assert steps_to(evaluations(0.7, 0.9), 0.5) == 0.0


def test_a_target_out_of_reach_has_no_steps():
    assert steps_to(evaluations(0.1, 0.4), 0.5) is None


def test_a_collapse_is_less_than_half_of_the_best_before():
    assert collapse_step(evaluations(0.2, 0.9, 0.46, 0.44)) == 30


def test_half_of_the_best_is_no_collapse_yet():
    assert collapse_step(evaluations(0.2, 0.8, 0.4)) is None


def test_a_policy_that_never_learned_anything_does_not_collapse():
    assert collapse_step(evaluations(0.0, 0.0)) is None


def test_the_deepest_fall_is_measured_from_the_best_before_it():
    depth, step = deepest_fall(evaluations(0.2, 0.8, 0.7, 0.9, 0.5, 1.0))
    assert (depth, step) == (pytest.approx(0.4), 40)
