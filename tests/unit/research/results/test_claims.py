"""Rows of the claims, worked by hand for a target of 0.8."""

from __future__ import annotations

from dataclasses import replace

import pytest

from research.cells.records import LOG_WEIGHT_QUANTILES
from research.results.claims import claim_rows
from tests.fixtures.study import record, steps


def row_of(*records):
    (row,) = claim_rows(records, 0.8)
    return row


def seeds(*curves):
    return [record(accuracies=curve, seed=seed) for seed, curve in enumerate(curves)]


def with_steps(lag, **columns):
    number = len(next(iter(columns.values())))
    return replace(record(lag=lag), steps=steps(number, **columns))


def test_a_row_is_about_all_seeds_of_a_method_at_a_lag():
    rows = claim_rows([record(lag=0), record(lag=32), record(lag=32, seed=2)], 0.8)
    assert [(row.method, row.lag, row.num_seeds) for row in rows] == [
        ("vcpo", 0, 1),
        ("vcpo", 32, 2),
    ]


def test_the_final_accuracy_has_its_mean_and_its_lowest_and_highest_seed():
    row = row_of(*seeds([0.8], [0.6]))
    assert row.final_accuracy_mean == pytest.approx(0.7)
    assert (row.final_accuracy_min, row.final_accuracy_max) == pytest.approx((0.6, 0.8))


def test_seeds_that_fell_or_never_learned_have_collapsed():
    # 0.3 is below half of 0.8; 0.39 falls below half of 0.9 before it recovers; 0.5 does neither.
    row = row_of(*seeds([0.2, 0.3], [0.9, 0.39, 0.9], [0.2, 0.5], [0.9, 0.9]))
    assert (row.collapse.count, row.collapse.trials) == (2, 4)
    assert row.collapse.low < 0.5 < row.collapse.high


def test_the_median_seed_stands_for_the_steps_and_their_range_beside_it():
    row = row_of(*seeds([0, 0.8], [0, 0, 0.8], [0, 0, 0, 0.8]))
    found = row.steps_to_target_min, row.steps_to_target, row.steps_to_target_max
    assert found == pytest.approx((10, 20, 30))


def test_a_seed_that_never_arrives_is_infinite():
    row = row_of(*seeds([0, 0.8], [0, 0.8], [0, 0.4]))
    assert (row.steps_to_target_min, row.steps_to_target) == pytest.approx((10, 10))
    assert row.steps_to_target_max is None
    assert row_of(*seeds([0, 0.4])).steps_to_target is None


def test_dips_are_told_as_mean_and_as_the_deepest():
    row = row_of(*seeds([0.9, 0.8, 0.9], [0.9, 0.6, 0.9]))
    assert (row.deepest_dip_mean, row.deepest_dip_max) == pytest.approx((0.2, 0.3))


def test_steps_before_the_full_lag_do_not_count_for_the_weights():
    row = row_of(with_steps(2, ess=(64.0, 64.0, 10.0, 20.0, 30.0)))
    assert row.ess_median == pytest.approx(20.0)
    # A twentieth of the way through three numbers is a tenth of the way from 10 to 20.
    assert row.ess_low == pytest.approx(11.0)


def test_quantiles_of_log_weights_are_medians_over_steps_but_for_the_largest():
    low, middle, high = ((float(shift),) * len(LOG_WEIGHT_QUANTILES) for shift in (1, 2, 6))
    row = row_of(with_steps(0, log_weights=(low, high, middle, None), ess=(1.0,) * 4))
    assert row.log_weights == (*[2.0] * (len(LOG_WEIGHT_QUANTILES) - 1), 6.0)


def test_a_cell_that_never_had_a_weight_has_no_distribution():
    row = row_of(with_steps(0, log_weights=(None, None), ess=(None, None)))
    assert (row.log_weights, row.ess_median, row.ess_low) == (None, None, None)
