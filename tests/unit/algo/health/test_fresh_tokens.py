import math

import numpy as np
import pytest

from tests.fixtures.fresh_tokens import block, block_of_tokens, blocks
from vcpo.algo.health.fresh_tokens import (
    gap_by_position,
    gap_of,
    gap_quantile,
    lower_median,
    scale_error_of,
    without_largest_gaps,
)


def test_the_gap_is_the_mean_over_tokens_with_the_error_of_its_blocks():
    # 16 tokens of 0.01 and 48 of 0.03: mean 0.025. Blocks differ from it by -0.015 * 16 and
    # 0.005 * 48 nats, -0.24 and 0.24; sqrt(2 * 0.24^2 * 2 / 1) / 64 = 0.0075.
    found = gap_of([block(0.01, num_tokens=16), block(0.03, num_tokens=48)])
    assert (found.value, found.error) == pytest.approx((0.025, 0.0075))
    assert found.least == pytest.approx(0.025 - 3 * 0.0075)


def test_a_single_block_says_nothing_about_its_error():
    assert gap_of([block(0.5)]).least == -math.inf


@pytest.mark.parametrize("bad", [50.0, math.inf], ids=str)
def test_one_broken_block_of_a_pool_is_left_out(bad):
    assert gap_of(without_largest_gaps([*blocks(0.01, 15), block(bad)])).value == pytest.approx(
        0.01
    )


def test_of_a_few_blocks_none_is_left_out():
    assert len(without_largest_gaps(blocks(0.01, 7))) == 7


def test_the_largest_of_each_block_show_the_99th_percentile():
    rng = np.random.default_rng(1)
    ratios = rng.standard_t(3, (4096, 32)) * 0.02
    pool = [block_of_tokens(row, -np.ones(32)) for row in ratios]
    assert gap_quantile(pool, 0.99) == pytest.approx(np.quantile(np.abs(ratios), 0.99), rel=0.05)


def test_no_half_of_the_values_raises_the_lower_median_above_another():
    assert lower_median([math.nan, 0.02, math.inf, 0.01]) == 0.02
    assert math.isnan(lower_median([math.nan]))


def test_the_scale_error_is_that_of_a_temperature():
    # softmax(2 z) against softmax(z) over two tokens: r is exactly half of log mu, and a constant.
    logprobs = np.array([-0.5, -1.5, -3.0, -0.1] * 8)
    found = scale_error_of([block_of_tokens(0.02 * logprobs + 0.03, logprobs)] * 3)
    assert found == pytest.approx(0.02)


def test_without_a_spread_of_log_probabilities_there_is_no_scale_error():
    assert scale_error_of([block_of_tokens([0.1, 0.2], [-1.0, -1.0])] * 2) is None
    assert scale_error_of([block_of_tokens([-math.inf, 0.2], [-1.0, -2.0])]) is None


def test_bins_of_positions_double():
    places = [0, 31, 32, 63, 64, 127, 128, 1000]
    found = gap_by_position(block(float(place), position=place) for place in places)
    assert found == pytest.approx({0: 15.5, 32: 47.5, 64: 95.5, 128: 128.0, 512: 1000.0})
