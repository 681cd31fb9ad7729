import math

import numpy as np
import pytest

from tests.fixtures.fresh_tokens import block_of_tokens, blocks
from vcpo.algo.ess.calibration import MISMATCH_CEILING
from vcpo.algo.health.mismatch_limits import MismatchClass, MismatchLimits

ROUNDED, EXACT = MismatchClass.ROUNDED, MismatchClass.EXACT


def test_twice_the_gap_of_rounding_and_four_times_its_square_are_explained():
    limits = MismatchLimits.of_rounding(blocks(0.01), ROUNDED)
    assert (limits.gap_nats, limits.variance) == pytest.approx((0.02, 4e-4))
    assert limits.scale_error == pytest.approx(0.004)
    assert limits.is_current


def test_of_float32_an_eighth_of_the_rounding_of_bfloat16_is_explained():
    limits = MismatchLimits.of_rounding(blocks(0.01), EXACT)
    assert (limits.gap_nats, limits.variance) == pytest.approx((0.0025, 4e-4 / 64))


def test_a_slope_that_rounding_has_is_explained():
    logprobs = np.array([-0.5, -1.5, -3.0, -0.1] * 8)
    pool = [block_of_tokens(-0.003 * logprobs, logprobs)] * 8
    assert MismatchLimits.of_rounding(pool, ROUNDED).scale_error == pytest.approx(0.007)


def test_a_gap_that_harms_nothing_is_explained_however_small_rounding_was():
    limits = MismatchLimits.of_rounding(blocks(2e-4), ROUNDED)
    assert (limits.gap_nats, limits.variance) == pytest.approx((1e-3, 4e-6))


def test_no_rounding_explains_more_than_the_ceiling():
    assert MismatchLimits.of_rounding(blocks(0.1), ROUNDED).variance == MISMATCH_CEILING
    assert MismatchLimits.of_gap(100.0).variance == MISMATCH_CEILING


def test_a_given_gap_explains_four_times_its_square_and_any_slope():
    limits = MismatchLimits.of_gap(0.03)
    assert (limits.gap_nats, limits.variance) == (0.03, pytest.approx(3.6e-3))
    assert limits.scale_error is None


@pytest.mark.parametrize("pool", [[], blocks(0.0), blocks(math.inf)], ids=["none", "zero", "inf"])
def test_tokens_that_say_nothing_give_no_limits(pool):
    assert MismatchLimits.of_rounding(pool, ROUNDED) is None
