import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo import FreshTrajectory, MismatchCalibration, NonFiniteWeightError, ess_ratio

# For L = 100 and log weights of +x and -x the likelihood peaks where v + v^2 / 4 = x^2, v = 100 s2.
X_OF_V_1 = math.sqrt(1.25)
X_OF_V_LN_2 = math.sqrt(math.log(2) + math.log(2) ** 2 / 4)


def calibrated(x: float, count: int = 64, **settings: float) -> MismatchCalibration:
    return MismatchCalibration(**settings).observe([x, -x] * (count // 2), [100] * count)


def sampled(variance_per_token: float, lengths: list[int], seed: int) -> list[float]:
    rng = random.Random(seed)
    variances = [variance_per_token * length for length in lengths]
    return [rng.gauss(-variance / 2, math.sqrt(variance)) for variance in variances]


def test_the_estimate_solves_the_likelihood_equation() -> None:
    assert calibrated(X_OF_V_1).variance_per_token == pytest.approx(0.01, rel=1e-12)


def test_the_estimate_finds_the_variance_behind_samples_of_mixed_length() -> None:
    lengths = [100 + 13 * (index % 70) for index in range(700)]
    log_weights = sampled(6.5e-4, lengths, seed=7)
    estimate = MismatchCalibration().observe(log_weights, lengths).variance_per_token
    assert estimate == pytest.approx(6.5e-4, rel=0.2)


def test_the_estimate_finds_the_variance_where_drift_outweighs_spread() -> None:
    lengths = [8000] * 400
    estimate = MismatchCalibration().observe(sampled(5e-3, lengths, seed=3), lengths)
    assert estimate.variance_per_token == pytest.approx(5e-3, rel=0.1)


def test_engines_that_agree_exactly_have_no_mismatch() -> None:
    agreed = calibrated(0.0)
    assert agreed.variance_per_token == 0.0
    assert agreed.on_policy_ess_ratio([10, 10_000]) == 1.0


def test_nothing_is_predicted_before_enough_was_observed() -> None:
    early = MismatchCalibration(minimum_count=4).observe([3.0, -3.0, 3.0], [100] * 3)
    assert early.variance_per_token is None
    assert early.on_policy_ess_ratio([100, 100]) == 1.0
    assert early.observe([-3.0], [100]).on_policy_ess_ratio([100, 100]) == 0.5


def test_equal_lengths_have_the_ratio_of_the_log_normal_law() -> None:
    ratio = calibrated(X_OF_V_1).on_policy_ess_ratio([200] * 64)
    assert ratio == pytest.approx(math.exp(-2), rel=1e-12)


def test_mixed_lengths_have_the_harmonic_mean_of_their_ratios() -> None:
    # exp(s2 L) = 2 at 100 tokens and 4 at 200: 4 / (2 + 4 + 2 + 4)
    ratio = calibrated(X_OF_V_LN_2).on_policy_ess_ratio([100, 200, 100, 200])
    assert ratio == pytest.approx(1 / 3, rel=1e-12)


def test_the_prediction_is_what_a_large_batch_shows() -> None:
    lengths = [30, 60] * 10_000
    shown = ess_ratio(sampled(0.01, lengths, seed=11))
    assert calibrated(X_OF_V_1).on_policy_ess_ratio(lengths) == pytest.approx(shown, rel=0.03)


def test_a_length_beyond_any_float_sinks_to_the_floor() -> None:
    assert calibrated(X_OF_V_1).on_policy_ess_ratio([10**7, 1, 1, 1]) == 0.25


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_the_prediction_lies_between_one_trajectory_and_all(lengths: list[int]) -> None:
    ratio = calibrated(X_OF_V_1).on_policy_ess_ratio(lengths)
    assert 1 / len(lengths) <= ratio <= 1.0


@given(st.lists(st.integers(1, 500), min_size=2, max_size=20), st.integers(0, 500))
def test_longer_trajectories_never_raise_the_prediction(lengths: list[int], more: int) -> None:
    calibration = calibrated(X_OF_V_1)
    longer = [lengths[0] + more, *lengths[1:]]
    shorter_ratio = calibration.on_policy_ess_ratio(lengths)
    assert calibration.on_policy_ess_ratio(longer) <= shorter_ratio * (1 + 1e-12)


@pytest.mark.parametrize("outlier", [50.0, 1e4, -1e4], ids=str)
def test_one_outlier_moves_the_estimate_by_less_than_a_fifth(outlier: float) -> None:
    estimate = calibrated(X_OF_V_1).observe([outlier], [100]).variance_per_token
    assert 0.01 < estimate < 0.012


def test_an_outlier_that_comes_first_does_no_harm_either() -> None:
    first = MismatchCalibration().observe([1e4], [100])
    estimate = first.observe([X_OF_V_1, -X_OF_V_1] * 32, [100] * 64).variance_per_token
    assert 0.01 < estimate < 0.012


def test_an_observation_one_half_life_old_counts_half() -> None:
    # v + v^2/4 at v = 2 is 3 = (0.5 * 1.25 + 3.875) / 1.5
    old = calibrated(X_OF_V_1, count=8, half_life=8, minimum_count=16)
    x = math.sqrt(3.875)
    new = old.observe([x, -x] * 4, [100] * 8)
    assert new.variance_per_token == pytest.approx(0.02, rel=1e-12)


def test_what_is_old_enough_is_forgotten() -> None:
    old = calibrated(50.0, half_life=8)
    new = old.observe([X_OF_V_1, -X_OF_V_1] * 32, [100] * 64)
    assert new.variance_per_token == pytest.approx(0.01, rel=1e-12)
    assert len(new.trajectories) == 64


def test_the_order_within_one_observation_changes_nothing() -> None:
    lengths = [50 + index for index in range(40)]
    log_weights = sampled(1e-3, lengths, seed=5)
    forward = MismatchCalibration().observe(log_weights, lengths)
    backward = MismatchCalibration().observe(log_weights[::-1], lengths[::-1])
    assert forward.variance_per_token == pytest.approx(backward.variance_per_token, rel=1e-12)


def test_observing_leaves_the_earlier_calibration_as_it_was() -> None:
    before = calibrated(X_OF_V_1)
    before.observe([9.0], [100])
    assert before == calibrated(X_OF_V_1)


def test_a_step_without_fresh_trajectories_changes_nothing() -> None:
    assert calibrated(X_OF_V_1).observe([], []) == calibrated(X_OF_V_1)


def test_a_weight_of_zero_has_no_scale_and_is_left_out() -> None:
    seen = calibrated(X_OF_V_1).observe([-math.inf], [100])
    assert seen == calibrated(X_OF_V_1)


def test_observations_survive_a_checkpoint() -> None:
    before = calibrated(X_OF_V_1).observe([0.3], [70])
    state = json.loads(json.dumps(before.to_dict()))
    assert MismatchCalibration().restored(state) == before


def test_settings_come_from_the_run_and_not_from_the_checkpoint() -> None:
    state = calibrated(X_OF_V_1, half_life=8.0).to_dict()
    restored = MismatchCalibration(half_life=99.0, minimum_count=5).restored(state)
    assert (restored.half_life, restored.minimum_count) == (99.0, 5)


@pytest.mark.parametrize(
    "state",
    [{}, {"trajectories": None}, {"trajectories": [[1.0, 2]]}, {"trajectories": [["x", 2, 0]]}],
    ids=["empty", "none", "short row", "no number"],
)
def test_a_state_of_another_form_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="give what to_dict returned"):
        MismatchCalibration().restored(state)


@pytest.mark.parametrize(
    "wrong", [{"log_weight": math.nan}, {"num_tokens": 0}, {"age": -1}], ids=lambda w: next(iter(w))
)
def test_an_impossible_observation_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FreshTrajectory(**{"log_weight": 0.0, "num_tokens": 1} | wrong)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_a_fresh_weight_that_is_no_number_is_named_with_its_place(value: float) -> None:
    with pytest.raises(NonFiniteWeightError, match=r"log_weights\[1\]"):
        MismatchCalibration().observe([0.0, value], [1, 1])


def test_lengths_out_of_range_are_refused_by_place() -> None:
    with pytest.raises(ValueError, match=r"num_tokens\[1\] is 0"):
        MismatchCalibration().observe([0.0, 0.0], [1, 0])
    with pytest.raises(ValueError, match=r"num_tokens\[0\] is -1"):
        MismatchCalibration().on_policy_ess_ratio([-1])


def test_inputs_of_different_length_or_none_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="log_weights has 2 entries and num_tokens 1"):
        MismatchCalibration().observe([0.0, 0.0], [1])
    with pytest.raises(ValueError, match="num_tokens is empty"):
        MismatchCalibration().on_policy_ess_ratio([])


@pytest.mark.parametrize("half_life", [0.0, -1.0, math.inf, math.nan], ids=str)
def test_a_half_life_that_is_none_is_refused(half_life: float) -> None:
    with pytest.raises(ValueError, match="half_life is"):
        MismatchCalibration(half_life=half_life)


@pytest.mark.parametrize("minimum_count", [0, 33])
def test_a_minimum_count_that_is_never_or_always_met_is_refused(minimum_count: int) -> None:
    with pytest.raises(ValueError, match=f"minimum_count is {minimum_count}"):
        MismatchCalibration(half_life=8.0, minimum_count=minimum_count)
