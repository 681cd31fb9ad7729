import math
import pickle
import random
from statistics import fmean, pstdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo.algo.ess.finite_batch import finite_batch_law, nats_at_size
from vcpo.algo.ess.importance_weights import (
    NonFiniteWeightError,
    WeightMoments,
    effective_sample_size,
    ess_ratio,
    log_sum_exp,
)
from vcpo.algo.ess.unit import near_equal_blocks
from vcpo.algo.ess.verdict import (
    LearningRateRule,
    RefusalReason,
    StepLimits,
    judge_step,
    learning_rate_scale,
)


@pytest.mark.parametrize(
    ("num_tokens", "size", "blocks"),
    [(10, 4, (5, 5)), (11, 4, (4, 4, 3)), (3, 100, (3,)), (4, 1, (1, 1, 1, 1))],
    ids=["two", "longer first", "one", "tokens"],
)
def test_a_trajectory_is_split_into_near_equal_blocks(num_tokens, size, blocks):
    assert near_equal_blocks(num_tokens, size) == blocks


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_blocks_add_up_and_differ_by_one_at_most(num_tokens, size):
    blocks = near_equal_blocks(num_tokens, size)
    assert sum(blocks) == num_tokens
    assert max(blocks) - min(blocks) <= 1


LOG_WEIGHTS = st.lists(st.floats(-50, 50), min_size=1, max_size=20)


def test_the_ess_of_four_weights_is_that_of_their_sums():
    # Weights 1, 1/2, 2, 4: 7.5^2 / 21.25
    moments = WeightMoments.of([math.log(weight) for weight in (1, 0.5, 2, 4)])
    assert moments.ess == pytest.approx(56.25 / 21.25, rel=1e-12)
    assert moments.ess_ratio == pytest.approx(56.25 / 85, rel=1e-12)


@given(LOG_WEIGHTS, st.floats(-1e4, 1e4))
def test_a_common_factor_changes_no_ess(log_weights, shift):
    shifted = WeightMoments.of([each + shift for each in log_weights])
    assert shifted.ess == pytest.approx(WeightMoments.of(log_weights).ess, rel=1e-8)


def test_an_ess_of_nothing_but_zeros_has_no_value():
    with pytest.raises(NonFiniteWeightError, match="log_sum is -inf"):
        _ = WeightMoments.of([-math.inf]).ess


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_sum_that_is_no_number_is_refused(value):
    with pytest.raises(NonFiniteWeightError, match="log_sum is"):
        WeightMoments(count=1, log_sum=value, log_sum_squares=0.0)


ratios = st.floats(1e-6, 1.0)
rules = st.sampled_from(LearningRateRule)


@pytest.mark.parametrize(
    ("rule", "expected"), [("sqrt", 0.813489), ("linear", 0.661765), ("none", 1.0)]
)
def test_each_rule_follows_its_power_of_the_ratio(rule: str, expected: float) -> None:
    # 56.25 / 85 = 0.661765; 0.813489^2 = 0.661764
    scale = learning_rate_scale(56.25 / 85.0, 1.0, LearningRateRule(rule))
    assert scale == pytest.approx(expected, abs=1e-6)


def test_the_ratio_is_measured_against_the_on_policy_one() -> None:
    assert learning_rate_scale(0.2, 0.8) == pytest.approx(0.5, rel=1e-15)


@given(ratios, ratios, rules)
def test_the_scale_is_positive_and_at_most_one(
    ratio: float, on_policy: float, rule: LearningRateRule
) -> None:
    assert 0.0 < learning_rate_scale(ratio, on_policy, rule) <= 1.0


@given(ratios, ratios, ratios, rules)
def test_the_scale_never_falls_when_the_ratio_rises(
    one: float, other: float, on_policy: float, rule: LearningRateRule
) -> None:
    low, high = sorted([one, other])
    assert learning_rate_scale(low, on_policy, rule) <= learning_rate_scale(high, on_policy, rule)


@pytest.mark.parametrize("bad", [0.0, -0.1, 1.0001, math.nan, math.inf], ids=str)
def test_a_ratio_out_of_range_is_refused_by_name(bad: float) -> None:
    with pytest.raises(ValueError, match=f"^ess_ratio is {bad}"):
        learning_rate_scale(bad, 1.0)
    with pytest.raises(ValueError, match=f"^on_policy_ess_ratio is {bad}"):
        learning_rate_scale(1.0, bad)


def log_ess_ratios(variance: float, num_weights: int, batches: int) -> list[float]:
    """Log ESS ratios of batches of log-normal weights, by drawing them."""
    normals = np.random.RandomState(17).standard_normal((batches, num_weights))
    weights = np.exp(math.sqrt(variance) * normals)
    squares = num_weights * np.square(weights).sum(axis=1)
    return list(2.0 * np.log(weights.sum(axis=1)) - np.log(squares))


@pytest.mark.parametrize(
    ("variance", "num_weights"),
    [(0.1, 16), (0.4, 16), (1.0, 16), (1.0, 64), (2.0, 64), (0.3, 700), (2.0, 2048), (4.0, 2048)],
)
def test_batches_scatter_as_the_law_says(variance: float, num_weights: int) -> None:
    logs = log_ess_ratios(variance, num_weights, batches=(1 << 20) // num_weights)
    law = finite_batch_law(variance, num_weights)
    assert law.bias - variance == pytest.approx(fmean(logs), abs=0.03 * variance)
    assert law.deviation == pytest.approx(pstdev(logs), rel=0.15)


def test_engines_that_agree_leave_nothing_to_chance() -> None:
    law = finite_batch_law(0.0, 16)
    assert (law.bias, law.deviation) == (0.0, 0.0)


@settings(max_examples=20)
@given(st.floats(0.01, 0.5), st.integers(16, 1000))
def test_four_times_the_weights_scatter_less_and_show_more_of_the_truth(
    variance: float, num_weights: int
) -> None:
    few, many = finite_batch_law(variance, num_weights), finite_batch_law(variance, 4 * num_weights)
    assert many.bias < few.bias
    assert many.deviation < few.deviation * 1.05


@settings(max_examples=20, deadline=None)
@given(st.floats(0.01, 1.5), st.floats(0.01, 1.5), st.sampled_from([2, 8, 32, 300]))
def test_who_misses_more_misses_more_at_every_size(one: float, other: float, size: int) -> None:
    less, more = sorted((one, other))
    assert nats_at_size(less, size, 64) <= nats_at_size(more, size, 64) * (1 + 0.02) + 1e-3


RATIOS = st.floats(0.001, 1.0)


def test_without_limits_the_scale_is_that_of_the_published_rule():
    verdict = judge_step(0.2, 0.8, StepLimits())
    assert (verdict.scale, verdict.refusal) == (0.5, None)


def test_what_chance_does_not_explain_is_damped_as_published():
    # 0.2 of 0.8 is 1.39 nats below, more than twice the reach of chance.
    assert judge_step(0.2, 0.8, StepLimits(), chance_nats=0.69).scale == pytest.approx(0.5)


def test_between_the_two_the_scale_falls_at_twice_the_pace():
    # 1.5 times the reach of 0.4 nats: as if 0.4 nats were gone.
    ratio = 0.8 * math.exp(-0.6)
    scale = judge_step(ratio, 0.8, StepLimits(), chance_nats=0.4).scale
    assert scale == pytest.approx(math.exp(-0.2), rel=1e-12)


@given(RATIOS, st.floats(0.0, 3.0))
def test_the_band_of_chance_ends_without_a_jump_on_either_side(expected, chance):
    for edge in (chance, 2 * chance):
        inside, outside = (
            judge_step(
                expected * math.exp(-edge * (1 + sign * 1e-9)),
                expected,
                StepLimits(),
                chance_nats=chance,
            ).scale
            for sign in (-1, 1)
        )
        assert inside == pytest.approx(outside, rel=1e-6)


@given(RATIOS, RATIOS, RATIOS, st.floats(0.0, 3.0))
def test_the_band_of_chance_never_damps_more_of_a_batch_more(one, other, expected, chance):
    low, high = (
        judge_step(ratio, expected, StepLimits(), chance_nats=chance).scale
        for ratio in sorted((one, other))
    )
    assert low <= high * (1 + 1e-9)


@given(RATIOS, RATIOS, st.floats(0.0, 3.0))
def test_the_band_of_chance_never_damps_more_than_the_published_rule(ratio, expected, chance):
    published = min(1.0, math.sqrt(ratio / expected))
    lenient = judge_step(ratio, expected, StepLimits(), chance_nats=chance).scale
    assert lenient >= published * (1 - 1e-9)


@pytest.mark.parametrize("chance", [800.0, 1e300])
def test_a_chance_that_reaches_beyond_any_float_explains_everything(chance):
    assert judge_step(1e-300, 1.0, StepLimits(), chance_nats=chance).scale == 1.0


def test_above_its_target_a_batch_is_not_damped_and_below_it_from_there():
    limits = StepLimits(target_ess_ratio=0.5)
    assert judge_step(0.4, 0.8, limits).scale == 1.0
    assert judge_step(0.1, 0.8, limits).scale == pytest.approx(0.5)  # a quarter of 0.4


def test_chance_counts_from_the_target():
    limits = StepLimits(target_ess_ratio=0.5)
    ratio = 0.4 * math.exp(-0.3)
    assert judge_step(ratio, 0.8, limits, chance_nats=0.31).scale == 1.0
    assert judge_step(ratio, 0.8, limits, chance_nats=0.1).scale == pytest.approx(math.exp(-0.15))


def test_too_little_of_a_batch_is_refused():
    limits = StepLimits(refuse_below=0.1)
    assert judge_step(0.079, 0.8, limits).refusal is RefusalReason.LOW_ESS
    assert judge_step(0.081, 0.8, limits).refusal is None


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", ["ess_ratio", "kl_per_token", "gradient_norm"])
def test_what_is_no_number_refuses_the_step(name, value):
    numbers = {"ess_ratio": 0.5, name: value}
    verdict = judge_step(on_policy_ess_ratio=1.0, limits=StepLimits(), **numbers)
    assert (verdict.scale, verdict.refusal) == (0.0, RefusalReason.NON_FINITE)


@given(RATIOS, RATIOS, st.floats(0.0, 0.9))
def test_a_refused_step_has_no_scale_and_a_taken_one_has(ratio, expected, below):
    verdict = judge_step(ratio, expected, StepLimits(refuse_below=below))
    assert (verdict.refusal is None) == (0.0 < verdict.scale <= 1.0)


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
