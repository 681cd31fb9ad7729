"""The baselines of the studies against numbers by hand."""

import math

import pytest

from research.baselines import (
    opob_leave_one_out,
    published,
    released_opob,
    shrunk_baselines,
    shrunk_opob,
    shrunk_pessimistic,
)


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


def test_the_published_baseline_counts_the_weight_twice():
    # w^4 = (16, 1, 1/16, 1/16); 16.0625 / 17.125
    found = published([1, 0, 0, 1], [4, 1, 0.25, 0.25], [math.log(w) for w in (2, 1, 0.5, 0.5)])
    assert found[1] == pytest.approx(-16.0625 / 17.125)


def test_leave_one_out_measures_each_reward_against_the_optimal_baseline_of_the_others():
    # The others: (2*0 + 1*4) / 3, (1*1 + 1*4) / 2, (1*1 + 2*0) / 3.
    assert opob_leave_one_out([1, 0, 4], [1, 2, 1]) == pytest.approx([1 - 4 / 3, -5 / 2, 4 - 1 / 3])


def test_two_prompts_that_differ_as_much_as_their_baselines_miss_are_shrunk_by_half():
    # Means .75 and .25 around .5, m = 4. Within: (.1875 + .1875) / (2 * .75) = .25, so v = .0625.
    # Between: (.0625 - .5 * .0625) / .5 = .0625 = v, so half of .25 stays.
    groups = [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    assert shrunk_baselines(groups, [[1.0] * 4] * 2) == pytest.approx([0.625, 0.375])


def test_a_group_whose_norms_are_uneven_is_noisier_and_shrunk_more():
    # b = 1.5 and 0 around .75; 1/m = .625 and .5; sigma^2 = .75 / .875 = 6/7; v = 15/28 and 12/28;
    # tau^2 = (.5625 - (15/28 + 12/28) / 4) / .5 = 18/28; s = 18/33 and 18/30.
    found = shrunk_baselines([[2.0, 0.0], [0.0, 0.0]], [[3.0, 1.0], [2.0, 2.0]])
    assert found == pytest.approx([0.75 + 0.75 * 18 / 33, 0.75 - 0.75 * 18 / 30])


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[1.0, 1.0], [0.0, 0.0]], [1.0, 0.0]),  # no noise: each its own
        ([[1.0], [0.0]], [0.5, 0.5]),  # nothing shows the noise: the batch's
        ([[1.0, 0.0], [0.0, 1.0]], [0.5, 0.5]),  # prompts that do not differ: the batch's
    ],
)
def test_without_noise_or_differences_the_mix_is_one_of_its_ends(groups, expected):
    assert shrunk_baselines(groups, [[1.0] * len(each) for each in groups]) == expected


def test_groups_of_eight_share_a_shrunk_baseline_and_coverage_lowers_it():
    rewards = [1.0] * 8 + [0.0] * 8
    assert shrunk_opob(rewards, [1.0] * 16) == [0.0] * 16
    assert shrunk_pessimistic(rewards, [1.0] * 16, 0.5) == [0.5] * 8 + [0.0] * 8
