"""Exact intervals of a probability, against closed forms and the intervals of R."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.results.proportion import proportion

TRIALS = st.integers(1, 60)


@given(trials=TRIALS)
def test_no_outcome_leaves_the_probability_that_yields_none_in_one_of_forty(trials):
    found = proportion(0, trials)
    assert (found.share, found.low) == (0.0, 0.0)
    assert (1.0 - found.high) ** trials == pytest.approx(0.025)


@given(trials=TRIALS)
def test_outcomes_alone_mirror_no_outcome(trials):
    found = proportion(trials, trials)
    assert (found.share, found.high) == (1.0, 1.0)
    assert found.low**trials == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("count", "trials", "low", "high"),
    # As `binom.test(count, trials)` of R prints them.
    [(1, 10, 0.0025, 0.4450), (4, 10, 0.1216, 0.7376), (5, 10, 0.1871, 0.8129)],
)
def test_intervals_are_those_of_r(count, trials, low, high):
    found = proportion(count, trials)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)
