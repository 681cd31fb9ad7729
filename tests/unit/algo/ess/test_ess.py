import math
import random
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcpo.algo.ess.finite_batch import finite_batch_law, nats_at_size
from vcpo.algo.ess.importance_weights import NonFiniteWeightError, ess_ratio
from vcpo.algo.ess.learning_rate import LearningRateRule, learning_rate_scale
from vcpo.algo.ess.moments import WeightMoments
from vcpo.algo.ess.unit import block_log_weights, near_equal_blocks


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


def test_a_token_without_a_number_is_named():
    with pytest.raises(NonFiniteWeightError, match=r"log_ratios\[1\]"):
        block_log_weights([0.0, math.nan], (2,))


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
    """Log ESS ratios of batches, by the function that reads real ones."""
    rng = random.Random(17)
    return [
        math.log(
            ess_ratio([rng.gauss(-variance / 2, math.sqrt(variance)) for _ in range(num_weights)])
        )
        for _ in range(batches)
    ]


@pytest.mark.parametrize(
    ("variance", "num_weights"), [(0.1, 16), (0.4, 16), (1.0, 16), (1.0, 64), (2.0, 64), (0.3, 700)]
)
def test_batches_scatter_as_the_law_says(variance: float, num_weights: int) -> None:
    logs = log_ess_ratios(variance, num_weights, batches=64_000 // num_weights)
    law = finite_batch_law(variance, num_weights)
    assert law.bias - variance == pytest.approx(fmean(logs), abs=0.05 * variance)
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


@pytest.mark.parametrize(("variance", "num_weights"), [(-1.0, 4), (math.nan, 4), (1.0, 0)])
def test_numbers_out_of_range_are_refused(variance: float, num_weights: int) -> None:
    with pytest.raises(ValueError, match="give at least 0 and 1"):
        finite_batch_law(variance, num_weights)


@pytest.mark.parametrize(
    ("variance", "size", "other"), [(1.0, 8, 64), (0.5, 64, 16), (1.0, 512, 8)]
)
def test_what_one_size_misses_tells_what_another_would(
    variance: float, size: int, other: int
) -> None:
    missed = {n: -fmean(log_ess_ratios(variance, n, batches=64_000 // n)) for n in (size, other)}
    assert nats_at_size(missed[size], size, other) == pytest.approx(missed[other], rel=0.1)


@given(st.floats(-1.0, 5.0), st.integers(1, 5000))
def test_a_batch_reads_as_itself_at_its_own_size(nats: float, size: int) -> None:
    assert nats_at_size(nats, size, size) == nats


@settings(max_examples=20, deadline=None)
@given(st.floats(0.01, 1.5), st.floats(0.01, 1.5), st.sampled_from([2, 8, 32, 300]))
def test_who_misses_more_misses_more_at_every_size(one: float, other: float, size: int) -> None:
    less, more = sorted((one, other))
    assert nats_at_size(less, size, 64) <= nats_at_size(more, size, 64) * (1 + 0.02) + 1e-3
