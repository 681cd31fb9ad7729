import math
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.ess.importance_weights import (
    NonFiniteWeightError,
    effective_sample_size,
    ess_ratio,
    log_importance_weight,
    log_sum_exp,
    truncated_weight,
)

log_weights = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=40)
mild_log_weights = st.lists(st.floats(-20, 20), min_size=1, max_size=40)


def test_four_known_weights_are_worth_about_two_and_two_thirds() -> None:
    # (1 + 1/2 + 2 + 4)^2 / (1 + 1/4 + 4 + 16) = 56.25 / 21.25
    logs = [math.log(w) for w in (1.0, 0.5, 2.0, 4.0)]
    assert effective_sample_size(logs) == pytest.approx(56.25 / 21.25, rel=1e-14)
    assert ess_ratio(logs) == pytest.approx(0.662, abs=5e-4)


@pytest.mark.parametrize("log_weight", [0.0, 1e4, -1e4, 0.1], ids=str)
def test_equal_weights_leave_the_whole_batch_exactly(log_weight: float) -> None:
    assert ess_ratio([log_weight] * 7) == 1.0
    assert effective_sample_size([log_weight] * 7) == 7.0


def test_one_enormous_weight_leaves_exactly_one_trajectory() -> None:
    assert effective_sample_size([1e4, 0.0, -1e4, 0.0]) == 1.0
    assert ess_ratio([1e4, 0.0, -1e4, 0.0]) == 0.25


def test_a_weight_of_zero_is_a_trajectory_that_counts_for_nothing() -> None:
    assert ess_ratio([0.0, -math.inf]) == 0.5


def test_a_batch_of_zero_weights_is_refused() -> None:
    with pytest.raises(NonFiniteWeightError):
        ess_ratio([-math.inf, -math.inf])


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_weight_that_is_no_number_is_named_with_its_place(value: float) -> None:
    with pytest.raises(NonFiniteWeightError, match=rf"log_weights\[2\] is {value}") as caught:
        ess_ratio([0.0, 1.0, value])
    assert caught.value.index == 2


def test_the_error_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(NonFiniteWeightError("log_weights", 3, math.inf)))
    assert str(error) == str(NonFiniteWeightError("log_weights", 3, math.inf))


@pytest.mark.parametrize("function", [ess_ratio, effective_sample_size, log_sum_exp])
def test_an_empty_batch_is_refused(function) -> None:
    with pytest.raises(ValueError, match="empty"):
        function([])


@given(mild_log_weights, st.sampled_from([-1e4, -700.0, -16.0, 16.0, 700.0, 1e4]))
def test_a_common_factor_on_the_weights_changes_nothing(logs: list[float], shift: float) -> None:
    shifted = [log_weight + shift for log_weight in logs]
    assert ess_ratio(shifted) == pytest.approx(ess_ratio(logs), rel=1e-9)


@given(log_weights, st.randoms(use_true_random=False))
def test_the_order_of_the_batch_changes_nothing(logs: list[float], order: random.Random) -> None:
    shuffled = order.sample(logs, len(logs))
    assert ess_ratio(shuffled) == ess_ratio(logs)


@given(mild_log_weights)
def test_the_ratio_is_the_one_of_the_plain_formula_where_that_is_safe(logs: list[float]) -> None:
    weights = [math.exp(log_weight) for log_weight in logs]
    plain = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
    assert ess_ratio(logs) == pytest.approx(plain, rel=1e-10)


def test_log_sum_exp_of_equal_values_adds_the_log_of_their_number() -> None:
    assert log_sum_exp([1e4] * 8) == pytest.approx(1e4 + math.log(8), rel=1e-15)
    assert log_sum_exp([-1e4] * 8) == pytest.approx(-1e4 + math.log(8), rel=1e-15)


def test_a_trajectory_weight_is_the_product_of_its_token_ratios() -> None:
    # 0.5/0.25 * 0.1/0.2 * 0.9/0.3 = 2 * 0.5 * 3
    learner = [math.log(p) for p in (0.5, 0.1, 0.9)]
    rollout = [math.log(p) for p in (0.25, 0.2, 0.3)]
    assert log_importance_weight(learner, rollout) == pytest.approx(math.log(3.0), rel=1e-14)


def test_a_long_trajectory_loses_no_digits() -> None:
    # 2^-40 is exact in binary, yet lost beside 2^20 when the sum is rounded at every token.
    learner = [2.0**20, *([2.0**-40] * 1024), -(2.0**20)]
    assert log_importance_weight(learner, [0.0] * 1026) == 2.0**-30


def test_no_trained_token_makes_a_weight_of_one() -> None:
    assert log_importance_weight([], []) == 0.0


def test_a_token_the_learner_rules_out_makes_a_weight_of_zero() -> None:
    assert log_importance_weight([-1.0, -math.inf], [-1.0, -2.0]) == -math.inf


@pytest.mark.parametrize("learner", [-1.0, -math.inf, math.nan], ids=str)
def test_a_token_the_behavior_policy_could_not_have_sampled_is_refused(learner: float) -> None:
    with pytest.raises(NonFiniteWeightError, match=r"log_ratios\[1\]"):
        log_importance_weight([-1.0, learner], [-1.0, -math.inf])


def test_token_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens but rollout_logprobs has 1"):
        log_importance_weight([-1.0, -2.0], [-1.0])


@pytest.mark.parametrize(
    ("log_weight", "expected"),
    [
        (math.log(3.0), 3.0),
        (math.log(9.0), 8.0),
        (1e4, 8.0),
        (-1e4, 0.0),
        (-math.inf, 0.0),
        (math.log(0.01), 0.01),
    ],
    ids=["below", "above", "enormous", "vanishing", "zero", "small is not raised"],
)
def test_the_gradient_weight_is_capped_above_only(log_weight: float, expected: float) -> None:
    assert truncated_weight(log_weight, 8.0) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("cap", [0.0, -1.0, math.inf, math.nan], ids=str)
def test_a_cap_that_cannot_cap_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="cap is"):
        truncated_weight(0.0, cap)


@pytest.mark.parametrize("log_weight", [math.nan, math.inf], ids=str)
def test_the_cap_does_not_cover_up_a_weight_that_is_no_number(log_weight: float) -> None:
    with pytest.raises(NonFiniteWeightError, match=f"^log_weight is {log_weight}"):
        truncated_weight(log_weight, 8.0)
