import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.advantage import vtrace
from vcpo.algo.ess.importance_weights import NonFiniteWeightError

finite = st.floats(-3.0, 3.0)


def test_the_worked_example():
    # pi/mu = 2, .5, 1 cut at 1; r = 0, 0, 1; V = .2, .4, .6: delta = .2, .1, .4.
    found = vtrace([math.log(2.0), math.log(0.5), 0.0], [0.0, 0.0, 1.0], [0.2, 0.4, 0.6])
    assert found.targets == pytest.approx((0.7, 0.7, 1.0))
    assert found.advantages == pytest.approx((0.5, 0.3, 0.4))


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=8))
def test_on_policy_a_target_is_the_sum_of_the_rewards_to_come(rows):
    rewards, values = zip(*rows, strict=True)
    found = vtrace([0.0] * len(rows), rewards, values)
    sums = [math.fsum(rewards[t:]) for t in range(len(rows))]
    assert found.targets == pytest.approx(sums, abs=1e-9)
    gaps = [total - value for total, value in zip(sums, values, strict=True)]
    assert found.advantages == pytest.approx(gaps, abs=1e-9)


def test_a_token_that_the_learner_rules_out_ends_the_trace():
    found = vtrace([0.0, -math.inf], [0.0, 1.0], [0.5, 0.25])
    assert found.targets == (0.25, 0.25)
    assert found.advantages == (-0.25, 0.0)


def test_ratios_of_any_size_are_capped():
    assert vtrace([1e4, -1e4], [1.0, 1.0], [0.0, 0.0]).advantages == (1.0, 0.0)


@pytest.mark.parametrize("log_ratio", [math.nan, math.inf])
def test_a_ratio_that_is_no_number_is_refused(log_ratio):
    with pytest.raises(NonFiniteWeightError, match=r"log_ratios\[0\]"):
        vtrace([log_ratio], [0.0], [0.0])


def test_rows_of_different_length_are_refused():
    with pytest.raises(ValueError, match="2, 1 and 2 entries"):
        vtrace([0.0, 0.0], [1.0], [0.0, 0.0])


@pytest.mark.parametrize(("rewards", "values"), [([math.nan], [0.0]), ([0.0], [math.nan])])
def test_a_reward_or_value_that_is_no_number_is_refused(rewards, values):
    with pytest.raises(NonFiniteWeightError):
        vtrace([0.0], rewards, values)
