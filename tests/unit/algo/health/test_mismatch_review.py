import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.fresh_tokens import block, block_of_tokens, blocks
from vcpo.algo.ess.calibration import MismatchCalibration
from vcpo.algo.health.mismatch_limits import MismatchClass, MismatchLimits
from vcpo.algo.health.mismatch_review import (
    WINDOW_BLOCKS,
    MismatchCause,
    MismatchWindow,
    is_below_ess_floor,
)

LIMITS = MismatchLimits(gap_nats=0.06, variance=3.6e-3, scale_error=0.004)


def window_of(**shown):
    """Blocks by worker."""
    return MismatchWindow().observe(shown)


def review_of(*gaps, limits=LIMITS, count=8):
    """The review of one worker for each gap."""
    shown = {f"worker-{number}": blocks(gap, count) for number, gap in enumerate(gaps)}
    return MismatchWindow().observe(shown).review(limits)


def names(review):
    return [fault.worker for fault in review.at_fault]


def test_the_gap_is_that_of_the_median_worker():
    review = review_of(0.01, 0.02, 0.03)
    assert review.gap_nats == pytest.approx(0.02)
    assert review.divergence_nats == pytest.approx(0.02**2 / 2)
    assert (review.is_exceeded, review.is_sure, review.cause) == (False, False, None)


def test_without_fresh_tokens_nothing_is_said():
    review = MismatchWindow().review(LIMITS)
    assert (review.gap_nats, review.is_exceeded, review.at_fault) == (None, False, ())


def test_a_few_fresh_blocks_settle_nothing():
    review = window_of(a=blocks(5.0, 7)).review(LIMITS)
    assert (review.gap_nats, review.is_exceeded) == (None, False)


def test_a_few_blocks_of_each_worker_are_enough_together():
    assert review_of(0.01, 0.02, count=4).gap_nats == pytest.approx(0.01)


def test_blocks_of_several_steps_are_judged_together():
    window = window_of(a=blocks(0.01, 7)).observe({"a": blocks(0.03, 1)})
    assert window.review(LIMITS).gap_nats == pytest.approx(0.01)  # the largest is left out


def test_a_gap_above_the_limit_says_how_far_and_what_to_compare():
    review = review_of(0.41)
    assert (review.is_exceeded, review.is_sure) == (True, True)
    assert review.message.startswith("rollout engine and learner differ by 0.41 nats per token on")
    assert "256 fresh tokens; at most 0.06 is expected" in review.message
    assert "temperature" in review.message


def test_a_gap_that_may_be_another_rounding_is_told_and_not_refused():
    review = review_of(0.1)  # above 0.06, below 0.12
    assert (review.is_exceeded, review.is_sure) == (True, False)


def test_a_limit_of_long_ago_refuses_nothing():
    review = review_of(5.0, limits=replace(LIMITS, is_current=False))
    assert (review.is_exceeded, review.is_sure) == (True, False)


@pytest.mark.parametrize("bad", [5.0, math.inf], ids=str)
def test_up_to_a_half_of_the_workers_cannot_end_the_run(bad):
    review = review_of(bad, 0.01, bad, 0.02)
    assert (review.is_exceeded, review.gap_nats) == (False, pytest.approx(0.02))
    assert names(review) == ["worker-0", "worker-2"]


def test_a_majority_of_workers_with_a_gap_ends_the_run():
    review = review_of(0.01, 5.0, 5.0)
    assert (review.is_sure, review.gap_nats, review.at_fault) == (True, pytest.approx(5.0), ())


@pytest.mark.parametrize(
    ("gaps", "num_awaited"), [((5.0,), 1), ((5.0,), 2), ((5.0, 5.0), 2), ((math.inf, 5.0), 3)]
)
def test_workers_that_come_first_do_not_end_the_run_while_as_many_are_awaited(gaps, num_awaited):
    assert not review_of(*gaps).is_majority(num_awaited)


@pytest.mark.parametrize(("gaps", "num_awaited"), [((5.0, 5.0), 1), ((5.0,) * 4, 3), ((5.0,), 0)])
def test_a_majority_of_all_workers_with_a_gap_is_not_left_waiting(gaps, num_awaited):
    assert review_of(*gaps).is_majority(num_awaited)


@pytest.mark.parametrize("gap", [0.3, 5.0, 20.0])
def test_a_worker_far_above_the_others_is_at_fault(gap):
    (fault,) = review_of(0.01, 0.01, 0.01, gap).at_fault
    assert (fault.worker, fault.gap_nats, fault.num_tokens) == ("worker-3", gap, 256)
    assert "temperature" in fault.message
    assert "masked logits" in fault.message


def test_a_half_of_the_workers_may_be_at_fault():
    assert names(review_of(0.01, 0.5)) == ["worker-1"]


def test_in_float32_a_worker_in_bfloat16_is_at_fault():
    limits = MismatchLimits.of_rounding(blocks(0.004), MismatchClass.EXACT)
    assert names(review_of(5e-7, 5e-7, 0.004, limits=limits)) == ["worker-2"]


def test_a_worker_is_not_judged_by_a_few_blocks():
    window = window_of(a=blocks(0.01), b=blocks(0.01), bad=blocks(20.0, 7))
    assert window.review(LIMITS).at_fault == ()
    assert names(window.observe({"bad": blocks(20.0, 1)}).review(LIMITS)) == ["bad"]


def test_a_worker_is_at_fault_only_where_chance_is_ruled_out():
    # Half of the blocks at 0, half at 0.16: mean 0.08 (of 15: 0.0747), with an error of 0.02.
    mixed = [block(gap) for gap in (0.0, 0.16) * 8]
    review = window_of(a=blocks(0.01), b=blocks(0.01), maybe=mixed).review(LIMITS)
    assert review.workers["maybe"].gap.value > LIMITS.gap_nats
    assert review.at_fault == ()


def test_a_worker_that_becomes_bad_is_judged_by_its_newest_blocks():
    window = MismatchWindow()
    for _ in range(50):
        window = window.observe({"a": blocks(0.01), "b": blocks(0.01), "c": blocks(0.01)})
    assert all(len(seen.blocks) == WINDOW_BLOCKS for seen in window.workers.values())
    for _ in range(4):
        window = window.observe({"a": blocks(0.01), "b": blocks(0.01), "c": blocks(0.5)})
    assert names(window.review(LIMITS)) == ["c"]
    assert set(window.without(["c"]).workers) == {"a", "b"}


def test_a_worker_without_fresh_tokens_is_forgotten():
    window = window_of(gone=blocks(5.0))
    for _ in range(128):
        window = window.observe({"a": [block(0.01)]})
    assert set(window.workers) == {"a"}


def test_a_window_survives_a_checkpoint():
    window = window_of(a=blocks(0.01), b=blocks(math.inf, 2)).observe({"a": blocks(0.02)})
    assert MismatchWindow.from_dict(window.to_dict()) == window
    with pytest.raises(ValueError, match="give what to_dict returned"):
        MismatchWindow.from_dict({"num_steps": 1, "workers": {"a": [1, [[1, 2]]]}})


def one_sided(gap):
    """Blocks of tokens that differ by a gap of one sign."""
    return [block_of_tokens([gap] * 32, [-1.0, -2.0] * 16)] * 8


def calibrated(variance, num_blocks=64):
    """A calibration by blocks of 32 tokens with this variance per token."""
    total = 32 * variance
    nats = math.sqrt(total + total**2 / 4)
    return MismatchCalibration(ceiling=LIMITS.variance).observe(
        [nats, -nats] * (num_blocks // 2), [32] * num_blocks
    )


def test_an_on_policy_ess_ratio_below_its_floor_is_refused_and_not_calibrated_away():
    window = window_of(a=one_sided(0.05))  # .05^2 * 32 per token
    broken = calibrated(1e-2)
    review = window.review(LIMITS, broken)
    assert (review.is_exceeded, review.is_sure) == (True, True)
    # exp(-s2 L) with the variance that rounding explains, not with the one that was seen.
    assert broken.on_policy_ess_ratio([100]) == 1.0  # of one trajectory
    assert broken.on_policy_ess_ratio([100] * 64) == pytest.approx(math.exp(-3.6e-3 * 100))


def test_below_a_floor_that_was_not_measured_the_engines_are_told_and_not_refused():
    review = window_of(a=one_sided(0.02)).review(MismatchLimits.of_gap(0.03), calibrated(1e-2))
    assert (review.is_exceeded, review.is_sure) == (True, False)


def test_a_ratio_that_chance_may_have_put_below_the_floor_is_not_refused():
    window = window_of(a=one_sided(0.05))
    # 64 blocks know it to 18 %: 1.5 times the floor's variance is within three errors.
    assert not window.review(LIMITS, calibrated(1.5 * 3.6e-3)).is_exceeded
    assert not window.review(LIMITS, calibrated(3e-3)).is_exceeded
    assert not window.review(LIMITS, MismatchCalibration()).is_exceeded


def mostly_sure(count, num_unsure):
    """Blocks of 32 tokens that agree to all digits, but for one token of some blocks."""
    sizes = [0.0] * 31
    rare = [block_of_tokens([*sizes, 0.3 * (-1) ** at], [-1.0] * 32) for at in range(num_unsure)]
    return [
        *rare,
        *(block_of_tokens([*sizes, 0.0], [-1.0] * 32) for _ in range(count - num_unsure)),
    ]


def test_the_rounding_of_a_policy_that_is_sure_of_nearly_all_tokens_is_no_fault():
    # The largest sixteenth is left out of what rounding explains: 2 of these 42 are left, and one
    # of the 5 that the worker shows.
    limits = MismatchLimits.of_rounding(mostly_sure(640, 42), MismatchClass.ROUNDED)
    shown = mostly_sure(64, 5)
    ratios = [each.log_ratio for each in shown]
    calibration = MismatchCalibration(ceiling=limits.variance).observe(ratios, [32] * 64)
    assert is_below_ess_floor(calibration, limits)
    assert not window_of(a=shown).review(limits, calibration).is_exceeded


SAMPLE = {"seed": st.integers(0, 2**32 - 1), "length": st.sampled_from([256, 512])}


def answers(rng, length, ratio_of, count=4):
    """Blocks of answers; ratio_of(log mu, position) are the log ratios of a block's tokens."""
    found = []
    for _ in range(count):
        for position in range(0, length, 32):
            logprobs = -rng.exponential(1.5, 32)
            found.append(
                block_of_tokens(ratio_of(logprobs, position + np.arange(32)), logprobs, position)
            )
    rng.shuffle(found)
    return found[:WINDOW_BLOCKS]


def cause_of(rng, length, ratio_of):
    shown = {name: answers(rng, length, ratio_of) for name in "abc"}
    return MismatchWindow().observe(shown).review(LIMITS)


@settings(max_examples=8, deadline=None)
@given(**SAMPLE, gap=st.floats(0.1, 3.0))
def test_a_gap_that_is_the_same_everywhere_is_called_constant(seed, length, gap):
    rng = np.random.default_rng(seed)
    review = cause_of(rng, length, lambda logprobs, _: rng.normal(0, gap, len(logprobs)))
    assert (review.is_exceeded, review.cause) == (True, MismatchCause.CONSTANT)


@settings(max_examples=8, deadline=None)
@given(**SAMPLE, gap=st.floats(0.2, 3.0))
def test_a_gap_that_grows_with_the_position_is_called_so(seed, length, gap):
    rng = np.random.default_rng(seed)
    review = cause_of(rng, length, lambda _, places: rng.normal(0, gap * (places + 1) / length))
    assert (review.is_exceeded, review.cause) == (True, MismatchCause.GROWS_WITH_POSITION)
    first, *_, last = review.gap_by_position.values()
    assert last > 2 * first


@settings(max_examples=8, deadline=None)
@given(**SAMPLE, error=st.sampled_from([-0.3, -0.05, -0.02, 0.02, 0.05, 0.3]))
def test_a_temperature_that_is_off_is_called_so_however_small_its_gap(seed, length, error):
    rng = np.random.default_rng(seed)
    review = cause_of(rng, length, lambda x, _: error * (x + 1.5) + rng.normal(0, 0.002, len(x)))
    assert (review.is_exceeded, review.cause) == (True, MismatchCause.SCALE)
    assert review.scale_error == pytest.approx(error, rel=0.1)


@pytest.mark.parametrize(("spread", "is_exceeded"), [(0.006, False), (0.06, True)])
def test_a_policy_that_is_sure_of_each_token_may_round_with_a_slope(spread, is_exceeded):
    # Measured on a solved task: 0.1 of log mu, in a gap of 5e-4 nats.
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(spread, (64, 32))
    shown = [block_of_tokens(-0.1 * each + rng.normal(0, 1e-5, 32), each) for each in logprobs]
    assert window_of(a=shown).review(LIMITS).is_exceeded is is_exceeded


@settings(max_examples=8, deadline=None)
@given(**SAMPLE, size=st.floats(0.0, 0.05))
def test_rounding_below_the_limit_has_no_cause(seed, length, size):
    rng = np.random.default_rng(seed)
    review = cause_of(rng, length, lambda x, _: rng.normal(0, size * (0.2 - x) / 1.7 + 1e-9))
    assert (review.is_exceeded, review.at_fault, review.cause) == (False, (), None)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_honest=st.integers(1, 5),
    share=st.floats(0.0, 1.0),
    fault=st.sampled_from(["offset", "noise", "temperature", "exact", "impossible"]),
    honest=st.sampled_from([0.01, 0.3]),
)
def test_no_half_of_the_workers_hides_or_triggers_a_fault_of_the_others(
    seed, num_honest, share, fault, honest
):
    rng = np.random.default_rng(seed)
    num_bad = round(share * (num_honest - 1 if honest > LIMITS.gap_nats else num_honest))

    def bad(logprobs, _):
        match fault:
            case "offset":
                return np.full_like(logprobs, 5.0)
            case "noise":
                return rng.normal(0, 2.0, len(logprobs))
            case "temperature":
                return 0.5 * logprobs
            case "exact":
                return np.zeros_like(logprobs)
            case _:
                return np.where(np.arange(len(logprobs)) == 0, -np.inf, 0.0)

    shown = {
        **{f"bad-{n}": answers(rng, 256, bad, 2) for n in range(num_bad)},
        **{
            f"honest-{n}": answers(rng, 256, lambda x, _: rng.normal(0, honest, len(x)), 2)
            for n in range(num_honest)
        },
    }
    review = MismatchWindow().observe(shown).review(LIMITS)
    assert review.is_exceeded == (honest > LIMITS.gap_nats)
    assert not any(fault.worker.startswith("honest") for fault in review.at_fault)
    if honest < LIMITS.gap_nats:
        assert len(review.at_fault) == (num_bad if fault != "exact" else 0)
