import math

import pytest

from vcpo.algo import (
    MISMATCH_CEILING,
    MISMATCH_LIMITS_NATS,
    MismatchCalibration,
    MismatchClass,
    explained_variance,
    review_mismatch,
)

ROUNDED = explained_variance(0.03)
"""4 * 0.03^2 = 3.6e-3."""


def calibration_of(*, num_blocks=64, calibration=None, **variances):
    """Of each worker so many blocks of 32 tokens with this variance per token."""
    log_weights, workers = [], []
    for worker, variance in variances.items():
        total = 32 * variance
        x = math.sqrt(total + total**2 / 4)
        log_weights += [x, -x] * (num_blocks // 2)
        workers += [worker] * num_blocks
    return (calibration or MismatchCalibration()).observe(log_weights, [32] * len(workers), workers)


def names(review):
    return [fault.worker for fault in review.at_fault]


def test_the_formats_of_a_run_explain_a_variance_up_to_the_ceiling():
    assert pytest.approx(3.6e-3) == ROUNDED
    assert explained_variance(MISMATCH_LIMITS_NATS[MismatchClass.EXACT]) == pytest.approx(1.6e-5)
    limit = MISMATCH_LIMITS_NATS[MismatchClass.QUANTIZED_OR_NOISY]
    assert explained_variance(limit) == MISMATCH_CEILING


def test_workers_that_rounding_explains_are_not_at_fault():
    seen = calibration_of(bf16=6.5e-4, rough=3e-3, exact=0.0)
    assert review_mismatch(seen, explained=ROUNDED).at_fault == ()


@pytest.mark.parametrize("variance", [0.03, 0.15, 20.0])
def test_a_worker_far_above_the_others_is_at_fault(variance):
    # A temperature of 0.7 for 1; 0.1 nat a token off; 10 nats a token off.
    seen = calibration_of(a=6.5e-4, b=6.5e-4, c=6.5e-4, bad=variance)
    (fault,) = review_mismatch(seen, explained=ROUNDED).at_fault
    assert (fault.worker, fault.count) == ("bad", 64)
    # Where the drift of a block outweighs its spread, blocks of the other sign are clipped.
    assert fault.variance_per_token == pytest.approx(variance, rel=0.2)
    assert fault.limit == pytest.approx(3.6e-3)
    assert "temperature" in fault.message
    assert "masked logits" in fault.message


def test_a_half_of_the_workers_may_be_at_fault():
    seen = calibration_of(a=6.5e-4, bad=0.1)
    assert names(review_mismatch(seen, explained=ROUNDED)) == ["bad"]


def test_in_float32_a_worker_in_bfloat16_is_at_fault():
    seen = calibration_of(a=1e-12, b=1e-12, bad=6.5e-4)
    assert names(review_mismatch(seen, explained=explained_variance(2e-3))) == ["bad"]


def test_a_worker_as_noisy_as_the_others_is_not_at_fault():
    # 4 * 2e-3 is above what the formats explain.
    seen = calibration_of(a=2e-3, b=2e-3, c=7e-3)
    assert review_mismatch(seen, explained=ROUNDED).at_fault == ()


def test_a_worker_is_not_judged_by_a_few_blocks():
    seen = calibration_of(a=6.5e-4, b=6.5e-4)
    seen = calibration_of(bad=20.0, num_blocks=62, calibration=seen)
    assert review_mismatch(seen, explained=ROUNDED).at_fault == ()
    seen = calibration_of(bad=20.0, num_blocks=16, calibration=seen)
    assert names(review_mismatch(seen, explained=ROUNDED)) == ["bad"]


def test_a_worker_that_becomes_bad_is_judged_by_its_newest_blocks():
    seen = MismatchCalibration()
    for _ in range(50):
        seen = calibration_of(a=6.5e-4, b=6.5e-4, c=6.5e-4, calibration=seen)
    assert review_mismatch(seen, explained=ROUNDED).at_fault == ()
    for _ in range(2):
        seen = calibration_of(a=6.5e-4, b=6.5e-4, c=0.1, num_blocks=32, calibration=seen)
    assert names(review_mismatch(seen, explained=ROUNDED)) == ["c"]


def test_without_a_worker_below_the_ceiling_nobody_is_at_fault():
    review = review_mismatch(calibration_of(a=0.1, b=0.2), explained=ROUNDED)
    assert (review.at_fault, review.engines_disagree) == ((), True)
    alone = review_mismatch(calibration_of(a=0.1), explained=ROUNDED)
    assert (alone.at_fault, alone.engines_disagree) == ((), True)


def test_a_few_workers_above_the_ceiling_say_nothing_of_those_that_are_not_judged_yet():
    seen = calibration_of(bad=0.1)
    seen = calibration_of(a=6.5e-4, b=6.5e-4, num_blocks=32, calibration=seen)
    review = review_mismatch(seen, explained=ROUNDED)
    assert (review.at_fault, review.engines_disagree) == ((), False)


def test_without_fresh_tokens_nothing_is_said():
    review = review_mismatch(MismatchCalibration(), explained=ROUNDED)
    assert (review.at_fault, review.engines_disagree) == ((), False)
