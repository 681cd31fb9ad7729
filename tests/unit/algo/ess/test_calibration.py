import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.fixtures.fleets import NOISE, VARIANCE, calibrations
from tests.fixtures.fresh_tokens import weighed
from vcpo.algo.ess.calibration import MISMATCH_CEILING, WINDOW_BLOCKS, MismatchCalibration
from vcpo.algo.ess.importance_weights import ess_ratio
from vcpo.algo.health.fresh_tokens import FreshBlock

# For L = 1000 and log weights of +x, -x the likelihood peaks where v + v^2 / 4 = x^2, v = 1000 s2.
X_OF_V_1 = math.sqrt(1.25)
X_OF_V_4 = math.sqrt(8.0)
X_OF_V_LN_2 = math.sqrt(math.log(2) + math.log(2) ** 2 / 4)


def pairs(x, count=64, worker=""):
    return weighed([x, -x] * (count // 2), [1000] * count, worker)


def calibrate(x, count=64):
    return MismatchCalibration().observe(pairs(x, count))


def sample_gaps(variance_per_token, lengths, seed):
    rng = random.Random(seed)
    variances = [variance_per_token * length for length in lengths]
    return [rng.gauss(-variance / 2, math.sqrt(variance)) for variance in variances]


def estimates_over(variances, blocks_per_step, seed):
    """Estimate after each step of a run whose mismatch takes these values, in blocks of 32."""
    calibration, found = MismatchCalibration(), []
    lengths = [32] * blocks_per_step
    for step, variance in enumerate(variances):
        gaps = sample_gaps(variance, lengths, seed + step)
        calibration = calibration.observe(weighed(gaps, lengths))
        found.append(calibration.variance_per_token)
    return found


def test_the_estimate_solves_the_likelihood_equation():
    assert calibrate(X_OF_V_1).variance_per_token == pytest.approx(0.001, rel=1e-12)


@pytest.mark.parametrize(
    ("variance", "lengths"),
    [(6.5e-4, [100 + 13 * (index % 70) for index in range(700)]), (5e-3, [8000] * 400)],
    ids=["mixed lengths", "drift outweighs spread"],
)
def test_the_estimate_finds_the_variance_behind_samples(variance, lengths):
    blocks = weighed(sample_gaps(variance, lengths, seed=7), lengths)
    found = MismatchCalibration().observe(blocks).variance_per_token
    assert found == pytest.approx(variance, rel=0.1)


def test_engines_that_agree_exactly_have_no_mismatch():
    agreed = calibrate(0.0)
    assert agreed.variance_per_token == 0.0
    assert agreed.on_policy_ess_ratio([10, 10_000]) == 1.0


def test_nothing_is_predicted_before_enough_was_observed():
    early = MismatchCalibration().observe(pairs(X_OF_V_LN_2, 6))
    assert (early.variance_per_token, early.relative_error) == (None, 0.0)
    assert early.on_policy_ess_ratio([1000, 1000]) == 1.0
    assert early.observe(pairs(X_OF_V_LN_2, 2)).on_policy_ess_ratio([1000, 1000]) == 0.5


def test_equal_lengths_have_the_ratio_of_the_log_normal_law():
    ratio = calibrate(X_OF_V_1).on_policy_ess_ratio([2000] * 64)
    assert ratio == pytest.approx(math.exp(-2), rel=1e-12)


def test_mixed_lengths_have_the_harmonic_mean_of_their_ratios():
    # exp(s2 L) = 2 at 1000 tokens and 4 at 2000: 4 / (2 + 4 + 2 + 4)
    ratio = calibrate(X_OF_V_LN_2).on_policy_ess_ratio([1000, 2000, 1000, 2000])
    assert ratio == pytest.approx(1 / 3, rel=1e-12)


def test_the_prediction_is_what_a_large_batch_shows():
    lengths = [300, 600] * 10_000
    shown = ess_ratio(sample_gaps(0.001, lengths, seed=11))
    assert calibrate(X_OF_V_1).on_policy_ess_ratio(lengths) == pytest.approx(shown, rel=0.03)


def test_blocks_predict_whole_trajectories_though_their_tokens_are_far_from_normal():
    # Given its prefix a ratio is .8 or 1.2 on one token in fifty, and 1 on others. Its mean is 1,
    # that of its square 1 + .02 * .04, so that E[w^2 | L] = 1.0008^L exactly.
    found = []
    for seed in range(5, 8):
        rng = random.Random(seed)
        gaps = [
            math.fsum(math.log(rng.choice((0.8, 1.2))) for _ in range(32) if rng.random() < 0.02)
            for _ in range(2048)
        ]
        calibration = MismatchCalibration().observe(weighed(gaps, [32] * 2048))
        found.append(calibration.on_policy_ess_ratio([512] * 64))
    assert fmean(found) == pytest.approx(1.0008**-512, rel=0.03)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20), st.integers(0, 500))
def test_the_prediction_lies_between_one_trajectory_and_all_and_falls_with_length(lengths, more):
    calibration = calibrate(X_OF_V_1)
    ratio = calibration.on_policy_ess_ratio(lengths)
    assert 1 / len(lengths) <= ratio <= 1.0
    longer = [lengths[0] + more, *lengths[1:]]
    assert calibration.on_policy_ess_ratio(longer) <= ratio * (1 + 1e-12)


@pytest.mark.parametrize("outlier", [50.0, 1e4, -1e4], ids=str)
def test_outliers_of_a_sixteenth_are_pulled_in(outlier):
    blocks = [*weighed([outlier] * 4, [1000] * 4), *pairs(X_OF_V_1, 60)]
    # Each counts as at most 3 deviations: 4 of 64 at 9 times the variance, and twice so.
    assert 0.001 <= MismatchCalibration().observe(blocks).variance_per_token < 0.0017


def test_a_mismatch_that_jumps_is_followed_within_a_few_steps():
    jumped = calibrate(X_OF_V_1, 2048)
    for _ in range(4):
        jumped = jumped.observe(pairs(X_OF_V_4))
    assert jumped.variance_per_token == pytest.approx(0.004, rel=1e-12)


def test_a_mismatch_that_grows_is_followed():
    variances = [6.5e-4 * step / 200 for step in range(1, 201)]
    found = estimates_over(variances, blocks_per_step=94, seed=1)
    errors = [abs(one / true - 1) for one, true in zip(found, variances, strict=True)]
    assert fmean(errors[50:]) < 0.1


def test_without_news_the_estimate_stays_and_its_error_grows():
    old = calibrate(X_OF_V_1)
    for _ in range(32):
        old = old.observe([])
    assert old.variance_per_token == calibrate(X_OF_V_1).variance_per_token
    assert old.age_steps == 32
    # Twice the variance of 2 / 64 after 32 steps.
    assert old.relative_error == pytest.approx(math.sqrt(2 * 2 / 64), rel=1e-12)
    assert old.observe(pairs(0.1)).age_steps == 0


def test_the_error_of_an_estimate_that_nobody_renews_has_an_end():
    seen = calibrate(X_OF_V_1)
    errors = [replace(seen, age_steps=age).relative_error for age in (150, 200, 10**9)]
    # 2 / 64 * 2^(age / 32) is 1 at an age of 160.
    assert errors == [pytest.approx(math.sqrt(2 / 64 * 2 ** (150 / 32))), 1.0, 1.0]


def test_much_is_wanted_until_the_estimate_is_precise_and_little_then():
    precise = calibrate(X_OF_V_1, 2048)
    wanted = MismatchCalibration().wanted_count, calibrate(X_OF_V_1).wanted_count
    assert (*wanted, precise.wanted_count) == (2048, 2048 - 64, 128)


def test_a_weight_of_zero_has_no_scale_and_is_left_out():
    seen = MismatchCalibration().observe([*pairs(X_OF_V_1), *weighed([-math.inf] * 8, [32] * 8)])
    assert seen.estimate == calibrate(X_OF_V_1).estimate


def test_observations_survive_a_checkpoint():
    kind = TypeAdapter(MismatchCalibration)
    before = calibrate(X_OF_V_1).observe(weighed([0.3, -math.inf], [70, 70], "a")).observe([])
    assert kind.validate_python(kind.dump_python(before)) == before


@pytest.mark.parametrize("nats", [math.nan, math.inf], ids=str)
def test_a_block_without_a_weight_or_a_token_is_refused(nats):
    with pytest.raises(ValueError, match="give at least 1 and a number below infinity"):
        FreshBlock(num_tokens=1, log_ratio=nats)
    with pytest.raises(ValueError, match="num_tokens is 0"):
        FreshBlock(num_tokens=0, log_ratio=0.1)


def fleet_of(**variances):
    """Of each worker 64 blocks of 100 tokens, with exactly this variance per token."""
    blocks = []
    for worker, variance in variances.items():
        total = 100 * variance
        x = math.sqrt(total + total**2 / 4)
        blocks += weighed([x, -x] * 32, [100] * 64, worker)
    return blocks


@pytest.mark.parametrize(
    ("variances", "expected"),
    [
        ({"a": 1e-4, "b": 1e-4, "bad": 5.0}, 1e-4),
        ({"x": 5.0, "a": 1e-4, "y": 5.0, "z": 5.0}, 1e-4),
        ({"bad": 5.0, "a": 1e-4}, 1e-4),
        ({"silent": 0.0, "a": 1e-4, "b": 1e-4}, 0.0),
        # Of 64 blocks the error is 18 %, so 1.3 agrees with 1 and 1.4 does not.
        ({"a": 1e-4, "b": 1.3e-4, "c": 1.4e-4}, 1.15e-4),
    ],
    ids=["one of three", "three of four", "one of two", "one without mismatch", "pooled"],
)
def test_workers_that_agree_with_the_lower_quartile_are_pooled(variances, expected):
    seen = MismatchCalibration().observe(fleet_of(**variances))
    assert seen.variance_per_token == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("size", [0, 7])
def test_workers_of_few_blocks_count_as_without_mismatch(size):
    # With a quarter of all blocks and more, nothing new is known.
    seen = calibrate(X_OF_V_1, 16)
    late = [block for n in range(2) for block in pairs(9.0, 8, f"new-{n}")[:size]]
    later = seen.observe(late) if late else seen
    assert later.estimate == seen.estimate


def test_more_mismatch_than_any_number_format_has_is_a_fault_and_not_calibrated():
    assert (
        MismatchCalibration().observe(fleet_of(a=0.5, b=0.4)).variance_per_token == MISMATCH_CEILING
    )


def test_a_worker_may_be_left_out():
    seen = MismatchCalibration().observe(fleet_of(a=1e-4, b=2e-4))
    assert seen.without({"a"}).variance_per_token == pytest.approx(2e-4, rel=1e-9)
    # Of nobody nothing new is known.
    assert seen.without({"a", "b"}).estimate == seen.estimate


def test_the_window_holds_the_newest_blocks_and_some_of_each_worker_of_a_step():
    names = [f"worker-{number}" for number in range(64)]
    step = [block for name in names for block in pairs(0.1, 256, name)]
    seen = MismatchCalibration().observe(step)
    assert {each.worker for each in seen.blocks} == set(names)
    for _ in range(5):
        seen = seen.observe(step)
    assert len(seen.blocks) == WINDOW_BLOCKS
    later = seen.observe([replace(block, worker="new") for block in pairs(0.1, WINDOW_BLOCKS)])
    assert {"new", "worker-63"} <= {each.worker for each in later.blocks}


@pytest.mark.parametrize("tokens", [100, 4000])
@pytest.mark.parametrize("workers", [4, 64])
@pytest.mark.parametrize("situation", NOISE)
def test_noisy_workers_and_names_that_go_do_not_move_the_estimate_off_the_truth(
    situation, workers, tokens
):
    found = list(calibrations(situation, workers=workers, tokens=tokens, steps=60, seed=0))
    last = fmean(each.variance_per_token for each in found[-10:])
    assert last == pytest.approx(VARIANCE, rel=0.1)
