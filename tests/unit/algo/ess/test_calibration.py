import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.ess.calibration import MISMATCH_CEILING, MismatchCalibration
from vcpo.algo.ess.importance_weights import NonFiniteWeightError, ess_ratio
from vcpo.algo.ess.worker_blocks import WorkerBlocks

# For L = 1000 and log weights of +x, -x the likelihood peaks where v + v^2 / 4 = x^2, v = 1000 s2.
X_OF_V_1 = math.sqrt(1.25)
X_OF_V_4 = math.sqrt(8.0)
X_OF_V_LN_2 = math.sqrt(math.log(2) + math.log(2) ** 2 / 4)


def calibrate(x: float, count: int = 64) -> MismatchCalibration:
    return MismatchCalibration().observe([x, -x] * (count // 2), [1000] * count)


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
    assert calibrate(X_OF_V_1).variance_per_token == pytest.approx(0.001, rel=1e-12)


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
    later = calibrate(0.0).observe([X_OF_V_1, -X_OF_V_1] * 32, [1000] * 64)
    assert later.variance_per_token == pytest.approx(0.001, rel=1e-12)


def test_nothing_is_predicted_before_enough_was_observed() -> None:
    early = MismatchCalibration(minimum_count=4).observe([3.0, -3.0, 3.0], [1000] * 3)
    assert early.variance_per_token is None
    assert early.on_policy_ess_ratio([1000, 1000]) == 1.0
    assert early.observe([-3.0], [1000]).on_policy_ess_ratio([1000, 1000]) == 0.5


def test_two_small_batches_are_enough_for_a_prediction() -> None:
    # Of B = 8 short answers, one block each, the second step makes 16.
    calibration = MismatchCalibration()
    for seed in (1, 2):
        assert calibration.variance_per_token is None
        calibration = calibration.observe(sample_gaps(0.001, [5] * 8, seed), [5] * 8)
    assert calibration.variance_per_token == pytest.approx(0.001, rel=0.7)
    assert calibration.relative_error == pytest.approx(math.sqrt(2 / 16), rel=1e-12)


def test_equal_lengths_have_the_ratio_of_the_log_normal_law() -> None:
    ratio = calibrate(X_OF_V_1).on_policy_ess_ratio([2000] * 64)
    assert ratio == pytest.approx(math.exp(-2), rel=1e-12)


def test_mixed_lengths_have_the_harmonic_mean_of_their_ratios() -> None:
    # exp(s2 L) = 2 at 1000 tokens and 4 at 2000: 4 / (2 + 4 + 2 + 4)
    ratio = calibrate(X_OF_V_LN_2).on_policy_ess_ratio([1000, 2000, 1000, 2000])
    assert ratio == pytest.approx(1 / 3, rel=1e-12)


def test_the_prediction_is_what_a_large_batch_shows() -> None:
    lengths = [300, 600] * 10_000
    shown = ess_ratio(sample_gaps(0.001, lengths, seed=11))
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
    estimate = calibrate(X_OF_V_1).observe([outlier], [1000]).variance_per_token
    assert 0.001 <= estimate < 0.0012


def test_an_outlier_that_comes_first_does_no_harm_either() -> None:
    first = MismatchCalibration().observe([1e4], [1000])
    for _ in range(3):
        first = first.observe([X_OF_V_1, -X_OF_V_1] * 32, [1000] * 64)
    assert first.variance_per_token == pytest.approx(0.001, rel=0.02)


def test_an_outlier_among_the_blocks_of_a_step_is_pulled_in() -> None:
    seen = MismatchCalibration().observe([1e4, *[X_OF_V_1, -X_OF_V_1] * 32], [1000] * 65)
    assert 0.001 < seen.variance_per_token < 0.0012


def test_steps_that_agree_are_pooled() -> None:
    pooled = calibrate(X_OF_V_1)
    for _ in range(9):
        pooled = pooled.observe([X_OF_V_1, -X_OF_V_1] * 32, [1000] * 64)
    pool = pooled.estimate
    assert pool is not None
    assert pool.count == 640
    assert pool.variance_per_token == pytest.approx(0.001)
    assert pooled.relative_error == pytest.approx(math.sqrt(2 / 640), rel=1e-12)


def test_a_mismatch_that_jumps_is_followed_at_once() -> None:
    # Of 64 blocks the standard error is 18 %: that around 0.04, and that around the pool of both,
    # at most 0.0028, do not meet.
    jumped = calibrate(X_OF_V_1).observe([X_OF_V_4, -X_OF_V_4] * 32, [1000] * 64)
    assert jumped.variance_per_token == pytest.approx(0.004, rel=1e-12)


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
    assert (old.age_steps, old.observe([0.1], [1000]).age_steps) == (1, 0)


def test_much_is_wanted_until_the_estimate_is_precise_and_little_then() -> None:
    precise = MismatchCalibration().observe([X_OF_V_1, -X_OF_V_1] * 1024, [1000] * 2048)
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
    before.observe([9.0], [1000])
    assert before == calibrate(X_OF_V_1)


def test_a_weight_of_zero_has_no_scale_and_is_left_out() -> None:
    seen = calibrate(X_OF_V_1).observe([-math.inf], [1000])
    assert seen == calibrate(X_OF_V_1).observe([], [])


def test_observations_survive_a_checkpoint() -> None:
    before = calibrate(X_OF_V_1).observe([0.3, 0.1], [70, 70], ["a", "b"]).observe([], [])
    state = json.loads(json.dumps(before.to_dict()))
    assert MismatchCalibration().restore(state) == before


def test_settings_come_from_the_run_and_not_from_the_checkpoint() -> None:
    state = calibrate(X_OF_V_1).to_dict()
    assert MismatchCalibration(minimum_count=5).restore(state).minimum_count == 5


WORKER = {"portions": [[16, 512, 0.1, 1]], "waiting": [[0.3, 32]], "last_step": 2}
STATE = {"age_steps": 0, "num_steps": 3, "estimate": [1e-3, 16], "workers": {"a": WORKER}}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"age_steps": 0, "steps": [[1, 5, 0.0]]},
        STATE | {"age_steps": -1},
        STATE | {"num_steps": -1},
        STATE | {"estimate": 1e-3},
        STATE | {"estimate": [math.inf, 16]},
        STATE | {"estimate": [1e-3, 0]},
        STATE | {"workers": None},
        STATE | {"workers": {"a": {}}},
        STATE | {"workers": {"a": WORKER | {"portions": [[3, 2, 1.0, 1]]}}},
        STATE | {"workers": {"a": WORKER | {"portions": [[3, 5, math.inf, 1]]}}},
        STATE | {"workers": {"a": WORKER | {"portions": [[3, 5, 1.0, 4]]}}},
        STATE | {"workers": {"a": WORKER | {"waiting": [[math.inf, 2]]}}},
        STATE | {"workers": {"a": WORKER | {"waiting": [[0.1, 0]]}}},
    ],
    ids=str,
)
def test_a_state_of_another_form_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="give what to_dict returned"):
        MismatchCalibration().restore(state)


def test_lengths_and_weights_must_match() -> None:
    with pytest.raises(ValueError, match="2 entries, num_tokens 1 and workers 2"):
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


def blocks_of(**variances: float) -> tuple[list[float], list[int], list[str]]:
    """Of each worker 64 blocks of 100 tokens, with exactly this variance per token."""
    log_weights, workers = [], []
    for worker, variance in variances.items():
        total = 100 * variance
        x = math.sqrt(total + total**2 / 4)
        log_weights += [x, -x] * 32
        workers += [worker] * 64
    return log_weights, [100] * len(workers), workers


@pytest.mark.parametrize(
    ("variances", "expected"),
    [
        ({"a": 1e-4, "b": 2e-4, "c": 5.0}, 2e-4),
        ({"a": 5.0, "b": 2e-4, "c": 5.0, "d": 1e-4}, 2e-4),
        ({"a": 5.0, "b": 2e-4}, 2e-4),
        ({"a": 0.0, "b": 2e-4, "c": 3e-4}, 2e-4),
    ],
    ids=["one of three", "two of four", "one of two", "one without mismatch"],
)
def test_the_estimate_is_the_lower_median_of_the_workers(variances, expected) -> None:
    seen = MismatchCalibration().observe(*blocks_of(**variances))
    assert seen.variance_per_token == pytest.approx(expected, rel=1e-9)


def test_more_mismatch_than_any_number_format_has_is_a_fault_and_not_calibrated() -> None:
    seen = MismatchCalibration().observe(*blocks_of(a=0.5, b=0.4))
    assert seen.variance_per_token == MISMATCH_CEILING


def test_the_median_of_workers_is_known_as_well_as_the_mean_of_fewer_blocks() -> None:
    # The median of three normal draws has 0.449 of their variance; 1 / (1 + 4 / pi) is 0.440.
    three = MismatchCalibration().observe(*blocks_of(a=1e-4, b=1e-4, c=1e-4))
    assert three.relative_error == pytest.approx(math.sqrt(0.449 * 2 / 64), rel=0.01)
    four = MismatchCalibration().observe(*blocks_of(a=1e-4, b=1e-4, c=1e-4, d=1e-4))
    assert four.relative_error == three.relative_error


def test_nobody_counts_before_he_has_shown_16_blocks() -> None:
    calibration = MismatchCalibration()
    log_weights, num_tokens, workers = blocks_of(good=1e-4, bad=5.0)
    few = [*range(4), *range(64, 128)]
    for step in range(1, 5):
        rows = [[each[at] for at in few] for each in (log_weights, num_tokens, workers)]
        calibration = calibration.observe(*rows)
        expected = None if step < 4 else pytest.approx(1e-4, rel=1e-9)
        assert calibration.variance_per_token == expected


def test_new_workers_do_not_take_the_estimate_away() -> None:
    seen = MismatchCalibration().observe(*blocks_of(a=1e-4))
    for worker in "bcd":
        seen = seen.observe([0.1], [100], [worker])
    assert seen.variance_per_token == pytest.approx(1e-4, rel=1e-9)
    assert set(seen.workers) == {"a", "b", "c", "d"}


def test_a_worker_that_shows_nothing_while_others_do_is_forgotten() -> None:
    seen = MismatchCalibration().observe(*blocks_of(gone=1e-4))
    for _ in range(200):
        seen = seen.observe([], [])
    for _ in range(127):
        seen = seen.observe([0.1], [100], ["there"])
    assert set(seen.workers) == {"gone", "there"}
    assert set(seen.observe([0.1], [100], ["there"]).workers) == {"there"}


def test_a_worker_may_be_left_out() -> None:
    seen = MismatchCalibration().observe(*blocks_of(a=1e-4, b=2e-4, c=3e-4))
    rest = seen.without({"a"})
    assert rest.variance_per_token == pytest.approx(2e-4, rel=1e-9)
    assert set(rest.workers) == {"b", "c"}
    # Of nobody nothing new is known.
    assert seen.without({"a", "b", "c"}).estimate == seen.estimate


def test_the_memory_of_a_long_run_of_many_workers_is_small() -> None:
    seen = MismatchCalibration(minimum_count=1)
    names = [f"worker-{number}" for number in range(1500)]
    for step in range(300):
        seen = seen.observe([0.1, 0.1], [32, 32], ["always", names[5 * step % 1500]])
    everybody = seen.observe([0.1] * 1500, [32] * 1500, names)
    assert len(everybody.workers) == 1024
    assert len(everybody.workers["worker-1499"].portions) == 1
    assert len(seen.workers["always"].portions) <= 14
    assert sum(each.num_portions for each in seen.workers["always"].portions) > 128


@given(st.integers(1, 600))
def test_portions_are_merged_into_sizes_that_double(number: int) -> None:
    worker = WorkerBlocks()
    for step in range(1, number + 1):
        worker = worker.observe([(0.1, 32)], step=step, minimum_count=1)
    sizes = [each.num_portions for each in worker.portions]
    assert sizes == sorted(sizes, reverse=True)
    assert all(sizes.count(size) <= 2 and size in (1, 2, 4, 8, 16, 32, 64) for size in sizes)
    assert sum(sizes) == number if number <= 127 else 127 <= sum(sizes) <= 254
