import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.advantage import BaselineScope, advantages, batch_advantages
from vcpo.algo.baseline import Baseline

EIGHT = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
with_a_baseline = [method for method in Baseline if method is not Baseline.NONE]
rewards_of_a_group = st.lists(st.floats(-100, 100), min_size=2, max_size=12)


@pytest.mark.parametrize(
    ("baseline", "right", "wrong"),
    [
        (Baseline.GROUP_MEAN, 5 / 8, -3 / 8),
        (Baseline.RLOO, 5 / 7, -3 / 7),
        (Baseline.GRPO, math.sqrt(5 / 3), -math.sqrt(3 / 5)),
        (Baseline.NONE, 1.0, 0.0),
    ],
)
def test_three_right_responses_of_eight(baseline: Baseline, right: float, wrong: float) -> None:
    # mean 3/8, population variance 15/64: (5/8) / sqrt(15/64) = sqrt(25/15)
    expected = [right if reward else wrong for reward in EIGHT]
    assert advantages(EIGHT, baseline) == pytest.approx(expected, rel=1e-14)


def test_opob_measures_rewards_against_the_optimal_baseline() -> None:
    got = advantages([1, 0, 1, 0], Baseline.OPOB, squared_norms=[1, 0.25, 16, 16])
    b = 17 / 33.25
    assert got == pytest.approx([1 - b, -b, 1 - b, -b], rel=1e-14)


def test_pessimistic_measures_rewards_against_a_lowered_optimal_baseline() -> None:
    # b* = (1*1 + 1*3) / 2 = 2; half of the way to the least reward, 1, is 1.5.
    got = advantages([1, 3], Baseline.PESSIMISTIC, squared_norms=[1, 1], coverage=0.5)
    assert got == [-0.5, 1.5]


def test_each_group_has_its_own_coverage_and_a_batch_has_one() -> None:
    # b* = 2 in both groups and over both; the least reward is 1.
    groups, norms = [[1, 3], [1, 3]], [[1, 1], [1, 1]]
    own = batch_advantages(groups, Baseline.PESSIMISTIC, squared_norms=norms, coverages=[1.0, 0.5])
    assert own == [[-1.0, 1.0], [-0.5, 1.5]]
    scope = BaselineScope.BATCH
    shared = batch_advantages(
        groups, Baseline.PESSIMISTIC, scope, squared_norms=norms, coverages=[0.0]
    )
    assert shared == [[0.0, 2.0], [0.0, 2.0]]


def test_a_number_of_coverages_that_is_not_that_of_the_baselines_is_refused() -> None:
    with pytest.raises(ValueError, match="coverages has 2 entries: give 1, one for each baseline"):
        batch_advantages(
            [[1, 3], [1, 3]],
            Baseline.PESSIMISTIC,
            BaselineScope.BATCH,
            squared_norms=[[1, 1], [1, 1]],
            coverages=[1.0, 1.0],
        )


@pytest.mark.parametrize("baseline", with_a_baseline)
@given(reward=st.floats(-1e6, 1e6), norms=st.lists(st.floats(0, 1e6), min_size=2, max_size=9))
def test_equal_rewards_give_exactly_zero_advantage(
    baseline: Baseline, reward: float, norms: list[float]
) -> None:
    logs = [-3.0 * index for index in range(len(norms))]
    assert advantages([reward] * len(norms), baseline, norms, logs) == [0.0] * len(norms)


def test_without_a_baseline_the_advantage_is_the_reward() -> None:
    assert advantages([1.0, 1.0], Baseline.NONE) == [1.0, 1.0]


@given(rewards_of_a_group)
def test_rloo_compares_each_with_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [
        reward - statistics.fmean(rewards[:index] + rewards[index + 1 :])
        for index, reward in enumerate(rewards)
    ]
    assert advantages(rewards, Baseline.RLOO) == pytest.approx(expected, abs=1e-10)


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=12).filter(lambda r: len(set(r)) > 1))
def test_grpo_advantages_have_mean_zero_and_spread_one(rewards: list[int]) -> None:
    got = advantages([float(reward) for reward in rewards], Baseline.GRPO)
    assert statistics.fmean(got) == pytest.approx(0.0, abs=1e-12)
    assert statistics.pstdev(got) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-200, 1e-8, 1e150], ids=str)
def test_grpo_does_not_depend_on_the_size_of_rewards(scale: float) -> None:
    assert advantages([scale, 0.0], Baseline.GRPO) == pytest.approx([1.0, -1.0], rel=1e-12)


@given(rewards_of_a_group, st.floats(-100, 100))
def test_adding_a_constant_to_rewards_changes_no_advantage(
    rewards: list[float], shift: float
) -> None:
    norms = [1.0 + index for index in range(len(rewards))]
    moved = advantages([reward + shift for reward in rewards], Baseline.OPOB, norms)
    assert moved == pytest.approx(advantages(rewards, Baseline.OPOB, norms), abs=1e-10)


def test_rloo_refuses_a_group_without_others() -> None:
    with pytest.raises(ValueError, match="rloo needs at least 2"):
        advantages([1.0], Baseline.RLOO)


@pytest.mark.parametrize("baseline", Baseline)
def test_an_empty_group_is_refused(baseline: Baseline) -> None:
    with pytest.raises(ValueError, match="rewards is empty"):
        advantages([], baseline, [], [])


def test_a_method_names_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="squared_norms is None: baseline opob"):
        advantages([1.0, 0.0], Baseline.OPOB)


def test_each_group_has_its_own_baseline() -> None:
    got = batch_advantages([[1.0, 0.0], [5.0, 5.0, 8.0]], Baseline.GROUP_MEAN)
    assert got == [[0.5, -0.5], [-1.0, -1.0, 2.0]]


def test_group_scope_hands_each_group_its_own_norms() -> None:
    norms = [[3.0, 1.0], [1.0, 1.0]]
    got = batch_advantages([[1.0, 0.0], [1.0, 0.0]], Baseline.OPOB, squared_norms=norms)
    assert got == [[0.25, -0.75], [0.5, -0.5]]


def test_batch_scope_has_one_baseline_for_all() -> None:
    groups = [[1.0, 0.0], [0.0, 0.0, 4.0]]
    got = batch_advantages(groups, Baseline.GROUP_MEAN, BaselineScope.BATCH)
    assert got == [[0.0, -1.0], [-1.0, -1.0, 3.0]]


def test_batch_scope_weighs_all_groups_by_their_norms() -> None:
    # (3 * 1 + 1 * 4) / (3 + 1 + 2 + 1) = 1
    norms = [[3.0, 1.0], [2.0, 1.0]]
    got = batch_advantages([[1, 0], [0, 4]], Baseline.OPOB, BaselineScope.BATCH, norms)
    assert got == [[0.0, -1.0], [-1.0, 3.0]]


@pytest.mark.parametrize("baseline", [Baseline.RLOO, Baseline.GRPO, Baseline.NONE])
def test_a_method_of_groups_cannot_span_a_batch(baseline: Baseline) -> None:
    with pytest.raises(ValueError, match=f"baseline is {baseline.value} with scope batch"):
        batch_advantages([[1.0, 0.0]], baseline, BaselineScope.BATCH)


def test_numbers_that_belong_to_another_group_are_refused() -> None:
    norms = [[1.0], [1.0, 1.0, 1.0]]
    with pytest.raises(ValueError, match="squared_norms has groups of"):
        batch_advantages([[1.0, 0.0], [1.0, 0.0]], Baseline.OPOB, BaselineScope.BATCH, norms)


def test_a_batch_without_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="groups is empty"):
        batch_advantages([], Baseline.GROUP_MEAN)
