import random
from itertools import chain
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.baseline import optimal_baseline
from vcpo.algo.shrinkage import shrunk_baselines

entries = st.tuples(st.floats(-100, 100), st.floats(1e-3, 1e3))
batches = st.lists(st.lists(entries, min_size=1, max_size=6), min_size=1, max_size=6)


def split(batch: list[list[tuple[float, float]]]) -> tuple[list[list[float]], list[list[float]]]:
    """Rewards and squared norms of a batch, by group."""
    return [[r for r, _ in group] for group in batch], [[n for _, n in group] for group in batch]


def test_two_prompts_that_differ_as_much_as_their_baselines_miss_are_shrunk_by_half() -> None:
    # Means .75 and .25 around .5, m = 4. Within: (.1875 + .1875) / (2 * .75) = .25, so v = .0625.
    # Between: (.0625 - .5 * .0625) / .5 = .0625 = v, so half of .25 stays.
    groups = [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    assert shrunk_baselines(groups, [[1.0] * 4] * 2) == pytest.approx([0.625, 0.375], rel=1e-14)


def test_a_group_whose_norms_are_uneven_is_noisier_and_shrunk_more() -> None:
    # b = 1.5 and 0 around .75; 1/m = .625 and .5; sigma^2 = .75 / .875 = 6/7; v = 15/28 and 12/28;
    # tau^2 = (.5625 - (15/28 + 12/28) / 4) / .5 = 18/28; s = 18/33 and 18/30.
    found = shrunk_baselines([[2.0, 0.0], [0.0, 0.0]], [[3.0, 1.0], [2.0, 2.0]])
    assert found == pytest.approx([0.75 + 0.75 * 18 / 33, 0.75 - 0.75 * 18 / 30], rel=1e-14)


def test_prompts_that_do_not_differ_have_the_baseline_of_the_batch() -> None:
    groups, norms = [[1.0, 0.0], [0.0, 1.0]], [[3.0, 1.0], [1.0, 3.0]]
    # .75 and .75
    assert shrunk_baselines(groups, norms) == [0.75, 0.75]


def test_groups_without_any_noise_keep_their_own() -> None:
    assert shrunk_baselines([[1.0, 1.0], [0.0, 0.0]], [[1.0, 2.0], [3.0, 4.0]]) == [1.0, 0.0]


def test_one_group_has_its_own_baseline() -> None:
    assert shrunk_baselines([[1.0, 0.0]], [[3.0, 1.0]]) == [0.75]


def test_groups_of_one_have_the_baseline_of_the_batch() -> None:
    assert shrunk_baselines([[1.0], [0.0]], [[3.0], [1.0]]) == [0.75, 0.75]


def test_without_any_norm_all_trajectories_count_alike() -> None:
    # Means 2 and 0 around .8; 1/m = 1/2 and 1/3; sigma^2 = 1 / (1/2 + 2/3) = 6/7.
    # q = .4 and .6; tau^2 = (.96 - .24 * (3/7 + 2/7)) / .48 = 23/14; s = 23/29 and 23/27.
    groups, norms = [[3.0, 1.0], [0.0, 0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0, 0.0]]
    expected = [0.8 + 1.2 * 23 / 29, 0.8 - 0.8 * 23 / 27]
    assert shrunk_baselines(groups, norms) == pytest.approx(expected, rel=1e-14)


@given(batches)
def test_each_lies_between_its_own_and_the_one_of_the_batch(
    batch: list[list[tuple[float, float]]],
) -> None:
    groups, norms = split(batch)
    whole = optimal_baseline([*chain(*groups)], [*chain(*norms)])
    for found, rewards, own_norms in zip(
        shrunk_baselines(groups, norms), groups, norms, strict=True
    ):
        low, high = sorted((whole, optimal_baseline(rewards, own_norms)))
        assert low - 1e-9 <= found <= high + 1e-9


@given(batches, st.floats(-100, 100), st.sampled_from([1e-12, 1e-3, 1e9]))
def test_a_shift_of_rewards_shifts_them_and_a_scale_of_norms_does_nothing(
    batch: list[list[tuple[float, float]]], shift: float, scale: float
) -> None:
    groups, norms = split(batch)
    moved = shrunk_baselines(
        [[reward + shift for reward in own] for own in groups],
        [[norm * scale for norm in own] for own in norms],
    )
    before = shrunk_baselines(groups, norms)
    assert moved == pytest.approx([each + shift for each in before], abs=1e-6)


@given(st.floats(-1e6, 1e6), batches)
def test_equal_rewards_give_exactly_their_value(
    reward: float, batch: list[list[tuple[float, float]]]
) -> None:
    _, norms = split(batch)
    groups = [[reward] * len(own) for own in norms]
    assert shrunk_baselines(groups, norms) == [reward] * len(norms)


def test_they_miss_the_values_of_prompts_by_less_than_either_of_the_two() -> None:
    # Values of prompts from N(0, 1/8), rewards around them from N(0, 1), eight of each: both the
    # group's own mean (v = 1/8) and the batch's (tau^2 = 1/8) miss by 1/8, their best mix by 1/16.
    draw = random.Random(3)
    misses = []
    for _ in range(500):
        values = [draw.gauss(0.0, 0.125**0.5) for _ in range(8)]
        groups = [[draw.gauss(value, 1.0) for _ in range(8)] for value in values]
        found = shrunk_baselines(groups, [[1.0] * 8] * 8)
        misses.append(fmean((each - value) ** 2 for each, value in zip(found, values, strict=True)))
    assert 1 / 16 < fmean(misses) < 0.75 / 8
