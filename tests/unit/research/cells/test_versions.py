"""Ages of data that are drawn, and the versions that sample it: at most as old as configured."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.cells.versions import Versions, drawn_ages
from research.study import Ages


def test_without_ages_every_group_is_as_old_as_the_lag():
    assert drawn_ages(None, 5, seed=3, step=7, num_groups=4) == [5, 5, 5, 5]


def test_a_batch_of_one_age_draws_once():
    ages = Ages(shares=(0.0, 0.25, 0.5, 1.0), drawnFor="batch")
    batches = [drawn_ages(ages, 8, seed=3, step=step, num_groups=4) for step in range(50)]
    assert {len(set(batch)) for batch in batches} == {1}
    assert {batch[0] for batch in batches} == {0, 2, 4, 8}


def test_each_share_is_as_likely_as_each_other_for_every_group():
    ages = Ages(shares=(0.0, 0.5, 0.5, 1.0))
    drawn = Counter(
        age for step in range(1000) for age in drawn_ages(ages, 2, seed=3, step=step, num_groups=4)
    )
    # Of 4,000 draws a quarter, a half and a quarter, within four standard deviations.
    assert drawn[0] == pytest.approx(1000, abs=110)
    assert drawn[1] == pytest.approx(2000, abs=126)
    assert drawn[2] == pytest.approx(1000, abs=110)


def test_a_seed_and_a_step_draw_the_same_ages_again_and_others_do_not():
    ages = Ages(shares=tuple(share / 100 for share in range(101)))
    first = drawn_ages(ages, 100, seed=3, step=7, num_groups=8)
    assert drawn_ages(ages, 100, seed=3, step=7, num_groups=8) == first
    assert drawn_ages(ages, 100, seed=4, step=7, num_groups=8) != first
    assert drawn_ages(ages, 100, seed=3, step=8, num_groups=8) != first


@given(lag=st.integers(0, 20), step=st.integers(0, 60), age=st.integers(0, 30))
def test_after_a_version_come_all_newer_ones(lag, step, age):
    versions = Versions(lag)
    for _ in range(step + 1):
        versions.add({})
    first = max(0, step - min(lag, age))
    assert [each.number for each in versions.since(age)] == list(range(first, step + 1))
