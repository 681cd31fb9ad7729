"""Rows and headlines of a grid, with numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from tests.fixtures.study import record
from vcpo_study.results.summary import grid_rows, lag_robustness


def row_of(*records):
    (row,) = grid_rows(records)
    return row


def test_a_row_is_about_all_seeds_of_a_method_at_a_lag():
    row = row_of(record(accuracies=[0.8] * 3, seed=1), record(accuracies=[0.6] * 3, seed=2))
    assert (row.method, row.lag, row.num_seeds) == ("vcpo", 0, 2)
    assert row.final_accuracy_mean == pytest.approx(0.7)
    assert row.final_accuracy_std == pytest.approx(math.sqrt(0.02))
    assert (row.final_accuracy_min, row.final_accuracy_max) == pytest.approx((0.6, 0.8))


def test_one_seed_has_no_spread():
    assert row_of(record()).final_accuracy_std == 0.0


def test_collapsed_seeds_are_counted():
    row = row_of(record(accuracies=[0.9, 0.1], seed=1), record(accuracies=[0.9, 0.9], seed=2))
    assert row.collapses == 1


def test_the_target_is_95_percent_of_the_methods_own_final_accuracy_at_lag_0():
    # 0.95 x 0.8 = 0.76: reached at step 10 at lag 0, and between steps 10 (0.72) and 20 (0.8).
    rows = grid_rows(
        [record(lag=0, accuracies=[0, 0.8, 0.8, 0.8]), record(lag=32, accuracies=[0, 0.72, 0.8])]
    )
    assert [row.steps_to_target for row in rows] == pytest.approx([9.5, 15.0])
    assert lag_robustness("vcpo", rows).steps_ratio_k32 == pytest.approx(15.0 / 9.5)


def test_the_median_seed_stands_for_all_and_one_that_never_gets_there_is_infinite():
    synchronous = [record(lag=0, accuracies=[0, 1, 1, 1])]
    stale = [
        record(lag=32, accuracies=accuracies, seed=seed)
        for seed, accuracies in enumerate([[0, 0, 0], [0, 0.95, 1], [0, 0, 0.95]])
    ]
    assert grid_rows([*synchronous, *stale])[1].steps_to_target == pytest.approx(20.0)


def test_a_target_that_most_seeds_miss_has_no_steps_and_no_ratio():
    rows = grid_rows([record(lag=0, accuracies=[0, 1]), record(lag=32, accuracies=[0, 0.1])])
    assert rows[1].steps_to_target is None
    assert lag_robustness("vcpo", rows).steps_ratio_k32 is None


def test_what_is_kept_at_lag_128_is_a_share_of_the_accuracy_at_lag_0():
    rows = grid_rows([record(lag=0, accuracies=[0.8]), record(lag=128, accuracies=[0.6])])
    assert lag_robustness("vcpo", rows).k128_over_k0 == pytest.approx(0.75)


def test_without_a_synchronous_cell_there_is_nothing_to_compare_with():
    rows = grid_rows([record(lag=32), record(lag=128)])
    found = lag_robustness("vcpo", rows)
    assert (found.k128_over_k0, found.steps_ratio_k32) == (None, None)
    assert rows[0].steps_to_target is None
