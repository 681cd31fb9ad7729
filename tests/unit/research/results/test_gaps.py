"""Gaps between the subject and other methods, worked by hand."""

from __future__ import annotations

import math

import pytest

from research.results.gaps import gaps
from tests.fixtures.study import record


def final(method, accuracy, *, seed, lag=32):
    """A cell that is at 0 for 10 steps and has its final accuracy after 20."""
    return record(method, lag, [0.0, 0.0, accuracy], seed=seed)


def test_seeds_are_compared_in_pairs():
    records = [final("vcpo", 0.8, seed=1), final("vcpo", 0.9, seed=2), final("vcpo", 0.1, seed=9)]
    records += [final("grpo", 0.7, seed=1), final("grpo", 0.6, seed=2)]
    (found,) = gaps(records, "vcpo", 0.5)
    assert (found.method, found.lag, found.num_pairs) == ("grpo", 32, 2)
    assert found.accuracy == pytest.approx(0.2)
    # Differences 0.1 and 0.3 scatter by sqrt(0.02); Student's t of one degree of freedom is 12.706.
    reach = 12.706 * math.sqrt(0.02) / math.sqrt(2)
    assert (found.low, found.high) == pytest.approx((0.2 - reach, 0.2 + reach), rel=1e-4)


def test_steps_to_the_target_are_over_those_of_the_method():
    records = [final("vcpo", 1.0, seed=1), final("grpo", 0.8, seed=1)]
    (found,) = gaps(records, "vcpo", 0.4)
    # 0.4 is reached after 10 + 10 * 0.4 / 1.0 and after 10 + 10 * 0.4 / 0.8 steps.
    assert found.steps_over.ratio == pytest.approx(14 / 15)
    assert (found.low, found.high) == (None, None)


def test_a_method_that_never_arrives_has_no_ratio_of_steps():
    records = [final("vcpo", 1.0, seed=1), final("grpo", 0.3, seed=1)]
    (found,) = gaps(records, "vcpo", 0.4)
    assert found.steps_over is None


def test_lags_and_seeds_that_one_of_two_lacks_are_no_gap():
    records = [final("vcpo", 1.0, seed=1), final("grpo", 0.3, seed=2)]
    records += [final("grpo", 0.3, seed=1, lag=8)]
    assert gaps(records, "vcpo", 0.4) == []
