"""The released recipe's advantages against numbers by hand."""

import math

import pytest

from research.baselines import released_opob


def test_the_weight_counts_twice_and_the_deviation_divides():
    # Weights 2, 1, .5, .5 in norms that are equal without them: w^4 is 16, 1, .0625, .0625.
    weights = [2.0, 1.0, 0.5, 0.5]
    found = released_opob(
        [1.0, 0.0, 0.0, 1.0], [w * w for w in weights], [math.log(w) for w in weights], [2] * 4
    )
    baseline = 16.0625 / 17.125
    expected = [2 * (1 - baseline), -2 * baseline, -2 * baseline, 2 * (1 - baseline)]
    assert found == pytest.approx(expected)


def test_norms_are_those_of_sums_over_tokens():
    # Lengths 1 and 2: the second norm counts four times, so b = 1 / 5, and the deviation is .5.
    found = released_opob([1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1, 2])
    assert found == pytest.approx([1.6, -0.4])


def test_equal_rewards_teach_nothing():
    assert released_opob([1.0, 1.0], [3.0, 1.0], [0.0, 0.5], [2, 2]) == [0.0, 0.0]
