"""How stale a subject's data was, worked by hand."""

from __future__ import annotations

from dataclasses import replace

from research.results.realised_ess import realised_ess
from tests.fixtures.study import record, steps


def at(seed, ratios, reference=0.5, **place):
    columns = {"ess_ratio": tuple(ratios), "on_policy_ess_ratio": (reference,) * len(ratios)}
    return replace(record(**{"lag": 32} | place, seed=seed), steps=steps(len(ratios), **columns))


def test_a_part_has_the_median_of_its_steps_and_then_of_the_seeds():
    first = at(1, [0.1, 0.3, 0.2] + [0.5] * 21)  # medians over parts of three: 0.2, then 0.5
    second = at(2, [0.3, 0.4, 0.3] + [0.25] * 21)
    (row,) = realised_ess([first, second], "vcpo")
    assert (row.lag, row.learning_rate, row.num_seeds) == (32, 1e-4, 2)
    assert row.ratios == (0.5, *(0.75,) * 7)  # (0.4 + 0.6) / 2, then (1 + 0.5) / 2


def test_a_batch_without_a_ratio_counts_as_none():
    (row,) = realised_ess([at(1, [0.0, 0.25] * 4 + [0.0] * 8)], "vcpo")
    assert row.ratios == (0.5,) * 4 + (None,) * 4


def test_other_methods_and_runs_without_lag_have_no_row():
    others = [at(1, [0.5] * 8, method="plain"), at(1, [0.5] * 8, lag=0)]
    assert realised_ess(others, "vcpo") == []


def test_lags_and_rates_are_in_order():
    given = [
        at(1, [0.5] * 8, lag=lag, learning_rate=rate) for lag in (32, 2) for rate in (3e-4, 1e-4)
    ]
    rows = [(each.lag, each.learning_rate) for each in realised_ess(given, "vcpo")]
    assert rows == [(2, 1e-4), (2, 3e-4), (32, 1e-4), (32, 3e-4)]
