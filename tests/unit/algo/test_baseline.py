import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.baseline import mean_baseline, optimal_baseline, pessimistic_baseline
from vcpo.algo.ess.importance_weights import NonFiniteWeightError

rewards_and_norms = st.lists(
    st.tuples(st.floats(-100, 100), st.floats(1e-3, 1e3)), min_size=1, max_size=16
)
gradients = st.lists(
    st.tuples(st.floats(-1, 1), st.lists(st.floats(-5, 5), min_size=3, max_size=3)),
    min_size=2,
    max_size=8,
)


def second_moment(baseline: float, group: list[tuple[float, list[float]]]) -> float:
    """Mean over trajectories of ||(R_i - b) h_i||^2, by components."""
    squares = [((reward - baseline) * part) ** 2 for reward, h in group for part in h]
    return sum(squares) / len(group)


def test_the_optimal_baseline_weighs_rewards_by_squared_norms() -> None:
    # w = (1, .5, 2, 4), ||g||^2 = (1, 1, 4, 1): n = (1, .25, 16, 16); (1 + 16) / 33.25
    assert optimal_baseline([1, 0, 1, 0], [1, 0.25, 16, 16]) == pytest.approx(17 / 33.25)


def test_counting_the_weight_once_gives_the_baseline_of_the_paper() -> None:
    # w = (2, 1, .5, .5), equal norms: n = (4, 1, .25, .25); 4.25 / 5.5
    assert optimal_baseline([1, 0, 0, 1], [4, 1, 0.25, 0.25]) == pytest.approx(0.773, abs=5e-4)


def test_what_is_not_shown_is_taken_to_be_worth_the_least() -> None:
    # b* = 4.25 / 5.5 of rewards 0 and 1; the data shows 3/4 of the policy.
    norms = [4, 1, 0.25, 0.25]
    assert pessimistic_baseline([1, 0, 0, 1], norms, 0.75) == pytest.approx(0.75 * 4.25 / 5.5)
    # The same with rewards of 2 and 3.
    assert pessimistic_baseline([3, 2, 2, 3], norms, 0.75) == pytest.approx(2 + 0.75 * 4.25 / 5.5)


@given(rewards_and_norms, st.floats(0, 1))
def test_pessimism_lies_between_the_least_reward_and_the_optimal_baseline(
    group: list[tuple[float, float]], coverage: float
) -> None:
    rewards, norms = map(list, zip(*group, strict=True))
    best = optimal_baseline(rewards, norms)
    found = pessimistic_baseline(rewards, norms, coverage)
    assert min(rewards) <= found <= best
    assert pessimistic_baseline(rewards, norms, 1.0) == best


@pytest.mark.parametrize("coverage", [-0.1, 1.1, math.nan])
def test_a_coverage_that_is_no_share_is_refused(coverage: float) -> None:
    with pytest.raises(ValueError, match="a share lies in"):
        pessimistic_baseline([1.0, 0.0], [1.0, 1.0], coverage)


def test_seen_responses_gain_as_much_as_probability_has_left_them() -> None:
    # A policy over four responses; the behavior policy samples the first three, each once here.
    # The gradient of (1 - C) (pi R over what is shown) is found by differences.
    policy, behavior, rewards = [0.2, 0.3, 0.1, 0.4], [1 / 3] * 3, [1.0, 0.0, 0.5]
    shown = sum(policy[:3])
    weights = [pi / mu for pi, mu in zip(policy, behavior, strict=False)]
    best = optimal_baseline(rewards, [w * w for w in weights])
    b = pessimistic_baseline(rewards, [w * w for w in weights], shown)

    def value(logits: list[float], rest: float) -> float:
        total = sum(map(math.exp, logits))
        return sum(
            math.exp(logit) / total * reward
            for logit, reward in zip(logits, [*rewards, rest], strict=True)
        )

    def slope(rest: float) -> float:
        logits, step = [math.log(each) for each in policy], 1e-6
        up, down = ([logits[0] + sign * step, *logits[1:]] for sign in (1, -1))
        return (value(up, rest) - value(down, rest)) / (2 * step)

    def estimate(baseline: float) -> float:
        # grad log pi(y) by the first logit is 1 - pi(1) for the first response, -pi(1) for others.
        gradients = [1 - policy[0], -policy[0], -policy[0]]
        terms = zip(weights, rewards, gradients, strict=True)
        return sum(w * (reward - baseline) * g for w, reward, g in terms) / 3

    assert estimate(best) == pytest.approx(slope(rest=best), abs=1e-8)
    assert estimate(b) == pytest.approx(slope(rest=b), abs=1e-8)
    assert estimate(b) > estimate(best)


@given(gradients, st.floats(-2, 2))
def test_no_other_baseline_has_a_smaller_second_moment(
    group: list[tuple[float, list[float]]], other: float
) -> None:
    norms = [sum(part * part for part in h) for _, h in group]
    best = optimal_baseline([reward for reward, _ in group], norms)
    assert second_moment(best, group) <= second_moment(other, group) + 1e-9


@given(rewards_and_norms, st.sampled_from([1e-290, 1e-16, 1e-8, 1e8, 1e290]))
def test_the_scale_of_the_norms_changes_nothing(
    group: list[tuple[float, float]], factor: float
) -> None:
    rewards, norms = map(list, zip(*group, strict=True))
    scaled = optimal_baseline(rewards, [factor * norm for norm in norms])
    assert scaled == pytest.approx(optimal_baseline(rewards, norms), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("norm", [5e-324, 1.5e308], ids=str)
def test_the_smallest_and_largest_norms_of_all_still_count(norm: float) -> None:
    assert optimal_baseline([1.0, 0.5, 0.0], [norm, norm, norm]) == 0.5


@given(rewards_and_norms)
def test_the_baseline_lies_within_the_rewards(group: list[tuple[float, float]]) -> None:
    rewards, norms = map(list, zip(*group, strict=True))
    assert min(rewards) <= optimal_baseline(rewards, norms) <= max(rewards)


@given(rewards_and_norms, st.floats(-100, 100))
def test_the_baseline_moves_along_with_the_rewards(
    group: list[tuple[float, float]], shift: float
) -> None:
    rewards, norms = map(list, zip(*group, strict=True))
    moved = optimal_baseline([reward + shift for reward in rewards], norms)
    assert moved == pytest.approx(optimal_baseline(rewards, norms) + shift, abs=1e-10)


def test_without_any_gradient_the_baseline_is_the_mean() -> None:
    assert optimal_baseline([1.0, 0.0, 0.0, 0.0], [0.0] * 4) == 0.25


def test_a_trajectory_without_gradient_has_no_say() -> None:
    assert optimal_baseline([1.0, 0.0], [0.0, 1e-300]) == 0.0


@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_the_mean_of_equal_rewards_is_that_reward_to_the_bit(reward: float, count: int) -> None:
    assert mean_baseline([reward] * count) == reward


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_norm_that_is_no_number_is_named_with_its_place(value: float) -> None:
    with pytest.raises(NonFiniteWeightError, match=rf"squared_norms\[1\] is {value}"):
        optimal_baseline([1.0, 0.0], [1.0, value])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_reward_that_is_no_number_is_named_with_its_place(value: float) -> None:
    with pytest.raises(ValueError, match=rf"rewards\[1\] is {value}"):
        optimal_baseline([1.0, value], [1.0, 1.0])


def test_a_negative_square_is_refused() -> None:
    with pytest.raises(ValueError, match=r"squared_norms\[0\] is -1.0"):
        optimal_baseline([1.0], [-1.0])


def test_numbers_for_another_count_of_trajectories_are_refused() -> None:
    with pytest.raises(ValueError, match="squared_norms has 1 entries for 2 rewards"):
        optimal_baseline([1.0, 0.0], [1.0])
