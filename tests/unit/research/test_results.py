"""The numbers of a study, by hand on evaluations at steps 0, 10, 20 and so on."""

import math
from random import Random

import pandas as pd
import pytest

from research.results import (
    by_lag,
    cell_frame,
    conditions,
    exact_interval,
    median_ratio,
    plane,
    safe_range,
    safe_rates,
    tuning,
)
from tests.fixtures.study import STUDY, record, study, study_document

RATES = (1e-5, 1e-4, 1e-3, 1e-2)
ENDS_AT_80 = [0.2, 0.4, 0.8, 0.8, 0.8]
"""Mean of the last quarter 0.8; the target of a study that knows nothing better is 0.76."""


def tuned(method, rate, accuracies, seed=101):
    return record(method, 0, accuracies, seed=seed, learning_rate=rate)


def rates(*records):
    return tuning(study(), cell_frame(records)).rates


def found(*accuracies):
    """The safe range of a curve over the first of `RATES`, for a target of 0.5."""
    low, high, is_cut = safe_range(pd.Series(accuracies, index=RATES[: len(accuracies)]), 0.5)
    return low, high, math.log10(high / low), is_cut


def test_the_target_is_95_percent_of_the_best_mean_of_any_method_and_rate():
    records = [tuned("vcpo", 1e-4, ENDS_AT_80), tuned("vcpo", 1e-3, [0.9, 0.6])]
    decided = tuning(study(), cell_frame([*records, tuned("plain", 1e-4, [0.7])]))
    assert decided.target == pytest.approx(0.95 * 0.8)
    assert tuning(study(), cell_frame([])) is None


def test_each_method_gets_the_rate_that_is_first_at_the_target():
    slow = [0.2, 0.3, 0.5, 0.8, 0.8]
    a = [tuned("vcpo", 1e-4, slow), tuned("vcpo", 1e-3, ENDS_AT_80)]
    b = [tuned("plain", 1e-4, ENDS_AT_80), tuned("plain", 1e-3, ENDS_AT_80)]
    assert rates(*a, *b) == {"vcpo": 1e-3, "plain": 1e-4}


def test_the_target_is_met_on_the_line_between_two_rates():
    # From 0.3 to 0.7 half of the decade from 1e-5 to 1e-4; from 0.7 to 0.1 a third of the next.
    low, high, decades, is_cut = found(0.3, 0.7, 0.1, 0.0)
    assert (low, high) == pytest.approx((10**-4.5, 10 ** (-4 + 1 / 3)))
    assert (decades, is_cut) == (pytest.approx(0.5 + 1 / 3), False)


def test_the_widest_of_several_ranges_counts():
    # 1e-5 alone is safe for 0.2 decades, 1e-3 with its neighbors for 0.5 + 1.
    _, high, decades, is_cut = found(0.6, 0.1, 0.9, 0.9)
    assert (high, decades, is_cut) == (pytest.approx(1e-2), pytest.approx(1.5), True)


def test_a_seed_that_never_arrives_may_leave_the_interval_open_above():
    # The median of three draws is 10 or infinite with a chance of 7 of 27 each.
    assert median_ratio([10.0, 20.0, math.inf], [5.0]) == (4.0, 2.0, math.inf)


@pytest.mark.parametrize(
    ("values", "references"),
    [([1.0, math.inf, math.inf], [1.0]), ([1.0], [math.inf]), ([1.0], [0.0]), ([1.0], [])],
)
def test_there_is_no_ratio_without_two_finite_medians_and_a_step(values, references):
    assert all(map(math.isnan, median_ratio(values, references)))


def test_the_interval_of_a_ratio_holds_the_true_one_about_as_often_as_it_says():
    # Ten seeds each of two exponential laws with medians in the proportion 1.5. A share of 200
    # trials scatters by 0.016; a percentile interval of ten values is a little too wide or narrow.
    draws, held = Random(7), 0
    for _ in range(200):
        values = [draws.expovariate(1.0) * 1.5 for _ in range(10)]
        _, low, high = median_ratio(values, [draws.expovariate(1.0) for _ in range(10)])
        held += low <= 1.5 <= high
    assert 0.88 <= held / 200 <= 1.0


def test_the_exact_interval_of_no_collapse_in_ten_ends_at_31_percent():
    # (1 - p)^10 = 0.025
    assert exact_interval(0, 10) == pytest.approx((0.0, 1 - 0.025**0.1))


def test_a_row_of_a_lag_has_collapses_steps_and_what_the_subject_gains_by_pairs():
    tuning_cells = [tuned("vcpo", 1e-4, ENDS_AT_80), tuned("plain", 1e-4, ENDS_AT_80)]
    stale = [record("vcpo", 32, [0.2, 0.8, 0.8, 0.8, 0.8], seed=seed) for seed in (1, 2, 3)]
    # 0.8, 0.6 and 0.1 at the end: what the subject gains is 0, 0.2 and 0.7.
    ends = {1: 0.8, 2: 0.6, 3: 0.1}
    others = [record("plain", 32, [0.2, 0.8, 0.8, end, end], seed=at) for at, end in ends.items()]
    cells = cell_frame([*tuning_cells, *stale, *others])
    rows = by_lag(study(), cells, tuning(study(), cells)).set_index(["method", "lag"])
    row = rows.loc["plain", 32]
    assert (row.cells, row.collapses) == (3, 1)
    assert row.final == pytest.approx(0.5)
    # Student's t of two degrees of freedom: 4.303; the standard deviation of 0, 0.2, 0.7 is 0.3606.
    assert (row.gain, row.gain_pairs) == (pytest.approx(0.3), 3)
    assert row.gain_high - row.gain == pytest.approx(4.303 * 0.3606 / math.sqrt(3), rel=1e-3)


def test_a_plane_has_means_over_its_seeds_and_safe_rates_need_every_rate():
    low = [record("vcpo", 32, [end, end], seed=at) for at, end in ((1, 0.5), (2, 0.7))]
    cells = cell_frame(low)
    assert plane(study(), cells).loc["vcpo", 32][1e-4] == pytest.approx(0.6)
    whole = cell_frame([*low, record("vcpo", 32, [0.0, 0.0], learning_rate=1e-3)])
    (row,) = safe_rates(study(), whole, 0.3).itertuples()
    assert row.decades == pytest.approx(0.5)


def test_a_condition_has_the_interval_of_its_prompts_and_what_is_kept_without_lag():
    spec = study_document(STUDY.replace("everySteps: 10", "everySteps: 10, prompts: 10")).spec
    cells = cell_frame(
        [record(lag=0, accuracies=[0.8, 0.8]), record(lag=32, accuracies=[0.4, 0.4])]
    )
    fresh, stale = conditions(spec, cells).itertuples()
    assert (stale.low, stale.high) == pytest.approx(exact_interval(4, 10))
    assert (stale.kept, math.isnan(fresh.kept)) == (pytest.approx(0.5), True)
