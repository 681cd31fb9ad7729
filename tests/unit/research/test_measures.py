"""Measures of one cell, on evaluations at steps 0, 10, 20 and so on."""

from __future__ import annotations

import math

import pytest

from research.measures import collapse_step, final_accuracy, has_collapsed, steps_to
from tests.fixtures.study import evaluations


def test_the_final_accuracy_is_the_mean_over_the_last_quarter_of_the_steps():
    # Of 80 steps the last quarter begins after step 60; the evaluations are at 70 and 80.
    assert final_accuracy(evaluations(0, 0, 0, 0, 0, 0, 0.1, 0.6, 0.8)) == pytest.approx(0.7)


def test_steps_between_two_evaluations_are_interpolated_and_end_there():
    # From 0.4 at step 10 to 0.8 at step 20, half of the way is 0.6.
    assert steps_to(evaluations(0.1, 0.4, 0.8), 0.6) == pytest.approx(15.0)
    assert steps_to(evaluations(0.1, 0.4), 0.5) == math.inf


def test_a_collapse_is_less_than_half_of_the_best_before():
    assert collapse_step(evaluations(0.2, 0.9, 0.46, 0.44)) == 30


def test_a_cell_that_ends_below_half_of_the_target_has_collapsed():
    rising = evaluations(0.1, 0.2, 0.39)
    assert collapse_step(rising) is None
    assert has_collapsed(rising, target=0.8)
    assert not has_collapsed(rising, target=0.78)


def test_a_cell_that_fell_has_collapsed_wherever_it_ends():
    assert has_collapsed(evaluations(0.8, 0.3, 0.8), target=0.8)
