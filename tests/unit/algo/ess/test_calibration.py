import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo import MismatchCalibration, NonFiniteWeightError, ess_ratio

# For L = 100 and log weights of +x and -x the likelihood peaks where v + v^2 / 4 = x^2, v = 100 s2.
X_OF_V_1 = math.sqrt(1.25)
X_OF_V_4 = math.sqrt(8.0)
X_OF_V_LN_2 = math.sqrt(math.log(2) + math.log(2) ** 2 / 4)


def calibrate(x: float, count: int = 64) -> MismatchCalibration:
    return MismatchCalibration().observe([x, -x] * (count // 2), [100] * count)


def sample_gaps(variance_per_token: float, lengths: list[int], seed: int) -> list[float]:
    rng = random.Random(seed)
    variances = [variance_per_token * length for length in lengths]
    return [rng.gauss(-variance / 2, math.sqrt(variance)) for variance in variances]


def estimates_over(variances: list[float], blocks_per_step: int, seed: int) -> list[float]:
    """Estimate after each step of a run whose mismatch takes these values, in blocks of 32."""
    calibration, found = MismatchCalibration(), []
    lengths = [32] * blocks_per_step
    for step, variance in enumerate(variances):
        calibration = calibration.observe(sample_gaps(variance, lengths, seed + step), lengths)
        found.append(calibration.variance_per_token or 0.0)
    return found


def test_the_estimate_solves_the_likelihood_equation() -> None:
    assert calibrate(X_OF_V_1).variance_per_token == pytest.approx(0.01, rel=1e-12)


def test_the_estimate_finds_the_variance_behind_samples_of_mixed_length() -> None:
    lengths = [100 + 13 * (index % 70) for index in range(700)]
    log_weights = sample_gaps(6.5e-4, lengths, seed=7)
    estimate = MismatchCalibration().observe(log_weights, lengths).variance_per_token
    assert estimate == pytest.approx(6.5e-4, rel=0.2)


def test_the_estimate_finds_the_variance_where_drift_outweighs_spread() -> None:
    lengths = [8000] * 400
    estimate = MismatchCalibration().observe(sample_gaps(5e-3, lengths, seed=3), lengths)
    assert estimate.variance_per_token == pytest.approx(5e-3, rel=0.1)


def test_engines_that_agree_exactly_have_no_mismatch() -> None:
    agreed = calibrate(0.0)
    assert agreed.variance_per_token == 0.0
    assert agreed.on_policy_ess_ratio([10, 10_000]) == 1.0


def test_engines_that_agreed_exactly_and_no_longer_do_are_found_out() -> None:
    later = calibrate(0.0).observe([X_OF_V_1, -X_OF_V_1] * 32, [100] * 64)
    assert later.variance_per_token == pytest.approx(0.01, rel=1e-12)


def test_nothing_is_predicted_before_enough_was_observed() -> None:
    early = MismatchCalibration(minimum_count=4).observe([3.0, -3.0, 3.0], [100] * 3)
    assert early.variance_per_token is None
    assert early.on_policy_ess_ratio([100, 100]) == 1.0
    assert early.observe([-3.0], [100]).on_policy_ess_ratio([100, 100]) == 0.5


def test_two_small_batches_are_enough_for_a_prediction() -> None:
    # Of B = 8 short answers, one block each, the second step makes 16.
    calibration = MismatchCalibration()
    for seed in (1, 2):
        assert calibration.variance_per_token is None
        calibration = calibration.observe(sample_gaps(0.01, [5] * 8, seed), [5] * 8)
    assert calibration.variance_per_token == pytest.approx(0.01, rel=0.7)
    assert calibration.relative_error == pytest.approx(math.sqrt(2 / 16), rel=1e-12)


def test_equal_lengths_have_the_ratio_of_the_log_normal_law() -> None:
    ratio = calibrate(X_OF_V_1).on_policy_ess_ratio([200] * 64)
    assert ratio == pytest.approx(math.exp(-2), rel=1e-12)


def test_mixed_lengths_have_the_harmonic_mean_of_their_ratios() -> None:
    # exp(s2 L) = 2 at 100 tokens and 4 at 200: 4 / (2 + 4 + 2 + 4)
    ratio = calibrate(X_OF_V_LN_2).on_policy_ess_ratio([100, 200, 100, 200])
    assert ratio == pytest.approx(1 / 3, rel=1e-12)


def test_the_prediction_is_what_a_large_batch_shows() -> None:
    lengths = [30, 60] * 10_000
    shown = ess_ratio(sample_gaps(0.01, lengths, seed=11))
    assert calibrate(X_OF_V_1).on_policy_ess_ratio(lengths) == pytest.approx(shown, rel=0.03)


def test_blocks_predict_whole_trajectories_though_their_tokens_are_far_from_normal() -> None:
    # Given its prefix a ratio is .8 or 1.2 on one token in fifty, and 1 on others. Its mean is 1,
    # that of its square 1 + .02 * .04, so that E[w^2 | L] = 1.0008^L exactly.
    rng = random.Random(5)
    blocks = [
        math.fsum(math.log(rng.choice((0.8, 1.2))) for _ in range(32) if rng.random() < 0.02)
        for _ in range(6000)
    ]
    calibration = MismatchCalibration().observe(blocks, [32] * len(blocks))
    exact = 1.0008**-512
    assert calibration.on_policy_ess_ratio([512] * 64) == pytest.approx(exact, rel=0.03)


def test_a_length_beyond_any_float_sinks_to_the_floor() -> None:
    assert calibrate(X_OF_V_1).on_policy_ess_ratio([10**7, 1, 1, 1]) == 0.25


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_the_prediction_lies_between_one_trajectory_and_all(lengths: list[int]) -> None:
    ratio = calibrate(X_OF_V_1).on_policy_ess_ratio(lengths)
    assert 1 / len(lengths) <= ratio <= 1.0


@given(st.lists(st.integers(1, 500), min_size=2, max_size=20), st.integers(0, 500))
def test_longer_trajectories_never_raise_the_prediction(lengths: list[int], more: int) -> None:
    calibration = calibrate(X_OF_V_1)
    longer = [lengths[0] + more, *lengths[1:]]
    shorter_ratio = calibration.on_policy_ess_ratio(lengths)
    assert calibration.on_policy_ess_ratio(longer) <= shorter_ratio * (1 + 1e-12)


@pytest.mark.parametrize("outlier", [50.0, 1e4, -1e4], ids=str)
def test_one_outlier_moves_the_estimate_by_less_than_a_fifth(outlier: float) -> None:
    estimate = calibrate(X_OF_V_1).observe([outlier], [100]).variance_per_token
    assert 0.01 < estimate < 0.012


def test_an_outlier_that_comes_first_does_no_harm_either() -> None:
    first = MismatchCalibration().observe([1e4], [100])
    for _ in range(3):
        first = first.observe([X_OF_V_1, -X_OF_V_1] * 32, [100] * 64)
    assert first.variance_per_token == pytest.approx(0.01, rel=1e-12)


def test_an_outlier_among_the_blocks_of_a_step_is_pulled_in() -> None:
    seen = MismatchCalibration().observe([1e4, *[X_OF_V_1, -X_OF_V_1] * 32], [100] * 65)
    assert 0.01 < seen.variance_per_token < 0.012


def test_steps_that_agree_are_pooled() -> None:
    pooled = calibrate(X_OF_V_1)
    for _ in range(9):
        pooled = pooled.observe([X_OF_V_1, -X_OF_V_1] * 32, [100] * 64)
    pool = pooled.estimate
    assert pool is not None
    assert (pool.count, pool.num_tokens) == (640, 64_000)
    assert pool.square_sum == pytest.approx(640 * 0.0125)
    assert pooled.relative_error == pytest.approx(math.sqrt(2 / 640), rel=1e-12)


def test_a_mismatch_that_jumps_is_followed_at_once() -> None:
    # Of 64 blocks the standard error is 18 %: that around 0.04, and that around the pool of both,
    # at most 0.028, do not meet.
    jumped = calibrate(X_OF_V_1).observe([X_OF_V_4, -X_OF_V_4] * 32, [100] * 64)
    assert jumped.variance_per_token == pytest.approx(0.04, rel=1e-12)


def test_a_mismatch_that_grows_is_followed() -> None:
    variances = [6.5e-4 * step / 200 for step in range(1, 201)]
    found = estimates_over(variances, blocks_per_step=94, seed=1)
    errors = [abs(one / true - 1) for one, true in zip(found, variances, strict=True)]
    assert sum(errors[50:]) / 150 < 0.08


def test_a_mismatch_that_stands_still_is_known_better_than_from_a_few_steps() -> None:
    found = estimates_over([6.5e-4] * 60, blocks_per_step=64, seed=2)
    assert found[-1] == pytest.approx(6.5e-4, rel=0.06)


def test_without_news_the_estimate_stays_and_its_error_grows() -> None:
    old = calibrate(X_OF_V_1)
    for _ in range(32):
        old = old.observe([], [])
    assert old.variance_per_token == calibrate(X_OF_V_1).variance_per_token
    assert old.age_steps == 32
    # Twice the variance of 2 / 64 after 32 steps.
    assert old.relative_error == pytest.approx(math.sqrt(2 * 2 / 64), rel=1e-12)


def test_the_error_of_an_estimate_that_nobody_renews_has_an_end() -> None:
    seen = calibrate(X_OF_V_1)
    errors = [replace(seen, age_steps=age).relative_error for age in (150, 200, 10**9)]
    # 2 / 64 * 2^(age / 32) is 1 at an age of 160.
    assert errors == [pytest.approx(math.sqrt(2 / 64 * 2 ** (150 / 32))), 1.0, 1.0]


def test_the_age_counts_from_the_start_when_nothing_was_ever_fresh() -> None:
    assert MismatchCalibration().observe([], []).observe([], []).age_steps == 2


def test_fresh_blocks_make_the_calibration_young_again() -> None:
    old = calibrate(X_OF_V_1).observe([], [])
    assert (old.age_steps, old.observe([0.1], [100]).age_steps) == (1, 0)


def test_much_is_wanted_until_the_estimate_is_precise_and_little_then() -> None:
    precise = MismatchCalibration().observe([X_OF_V_1, -X_OF_V_1] * 1024, [100] * 2048)
    wanted = MismatchCalibration().wanted_count, calibrate(X_OF_V_1).wanted_count
    assert (*wanted, precise.wanted_count) == (2048, 2048 - 64, 128)


def test_the_order_within_one_observation_changes_nothing() -> None:
    lengths = [50 + index for index in range(40)]
    log_weights = sample_gaps(1e-3, lengths, seed=5)
    forward = MismatchCalibration().observe(log_weights, lengths)
    backward = MismatchCalibration().observe(log_weights[::-1], lengths[::-1])
    assert forward.variance_per_token == pytest.approx(backward.variance_per_token, rel=1e-12)


def test_observing_leaves_the_earlier_calibration_as_it_was() -> None:
    before = calibrate(X_OF_V_1)
    before.observe([9.0], [100])
    assert before == calibrate(X_OF_V_1)


def test_a_weight_of_zero_has_no_scale_and_is_left_out() -> None:
    seen = calibrate(X_OF_V_1).observe([-math.inf], [100])
    assert seen == calibrate(X_OF_V_1).observe([], [])


def test_observations_survive_a_checkpoint() -> None:
    before = calibrate(X_OF_V_1).observe([0.3], [70]).observe([], [])
    state = json.loads(json.dumps(before.to_dict()))
    assert MismatchCalibration().restore(state) == before


def test_settings_come_from_the_run_and_not_from_the_checkpoint() -> None:
    state = calibrate(X_OF_V_1).to_dict()
    assert MismatchCalibration(minimum_count=5).restore(state).minimum_count == 5


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"trajectories": [[1.0, 2, 0]]},
        {"age_steps": 0, "steps": None},
        {"age_steps": 0, "steps": [["x", 2, 0]]},
        {"age_steps": 0, "steps": [[1, 5]]},
        {"age_steps": 0, "steps": [[3, 2, 1.0]]},
        {"age_steps": 0, "steps": [[1, 2, math.inf]]},
        {"age_steps": -1, "steps": []},
    ],
    ids=str,
)
def test_a_state_of_another_form_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="give what to_dict returned"):
        MismatchCalibration().restore(state)


def test_lengths_and_weights_must_match() -> None:
    with pytest.raises(ValueError, match="2 entries and num_tokens 1"):
        MismatchCalibration().observe([0.1, 0.2], [5])


def test_a_block_without_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_tokens\[1\] is 0"):
        MismatchCalibration().observe([0.1, 0.2], [5, 0])


@pytest.mark.parametrize("weight", [math.nan, math.inf], ids=str)
def test_a_weight_that_is_not_a_number_is_refused(weight: float) -> None:
    with pytest.raises(NonFiniteWeightError, match=r"log_weights\[0\]"):
        MismatchCalibration().observe([weight], [5])


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="minimum_count is 0"):
        MismatchCalibration(minimum_count=0)


def test_a_prediction_needs_a_batch() -> None:
    with pytest.raises(ValueError, match="num_tokens is empty"):
        calibrate(X_OF_V_1).on_policy_ess_ratio([])


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_tokens\[0\] is -1"):
        calibrate(X_OF_V_1).on_policy_ess_ratio([-1])
