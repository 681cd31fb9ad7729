import math

import numpy as np
import pytest

from tests.fixtures.fresh_tokens import block, block_of_tokens, blocks
from vcpo.algo.health.fresh_tokens import (
    FreshTokens,
    gap_of,
    gap_quantile,
    lower_median,
    position_bin,
    scale_error_of,
    variance_of,
    without_largest_gaps,
)


def test_sums_of_blocks_add_up():
    early = block_of_tokens([0.1, -0.2], [-1.0, -3.0], position=32)
    late = block_of_tokens([0.4], [-2.0], position=64)
    both = block_of_tokens([0.1, -0.2, 0.4], [-1.0, -3.0, -2.0])
    total = early + late
    assert (total.num_blocks, total.num_tokens, total.position) == (2, 3, 32)
    for name in ("absolute_log_ratio", "log_ratio", "square", "divergence", "logprob_log_ratio"):
        assert getattr(total, name) == pytest.approx(getattr(both, name))
    assert total.largest == 0.4
    assert FreshTokens() + early == early


def test_the_gap_is_the_mean_over_tokens_with_the_error_of_its_blocks():
    # 16 tokens of 0.01 and 48 of 0.03: mean 0.025. Blocks differ from it by -0.015 * 16 and
    # 0.005 * 48 nats, -0.24 and 0.24; sqrt(2 * 0.24^2 * 2 / 1) / 64 = 0.0075.
    found = gap_of([block(0.01, num_tokens=16), block(0.03, num_tokens=48)])
    assert (found.value, found.error) == pytest.approx((0.025, 0.0075))
    assert found.least == pytest.approx(0.025 - 3 * 0.0075)


def test_a_variance_that_one_block_of_two_has_is_as_uncertain_as_it_is_large():
    # By hand: .3^2 / 64, of which a block has .045 too much and the other as much too little; the
    # error is sqrt(2 * .045^2 * 2 / 1) / 64.
    found = variance_of([block_of_tokens([0.0] * 31 + [at], [-1.0] * 32) for at in (0.3, 0.0)])
    assert (found.value, found.error) == pytest.approx((0.09 / 64, 0.09 / 64))
    assert found.least < 0.0


def test_a_single_block_says_nothing_about_its_error():
    assert gap_of([block(0.5)]).least == -math.inf


@pytest.mark.parametrize("bad", [50.0, math.inf], ids=str)
def test_one_broken_block_of_a_pool_is_left_out(bad):
    assert gap_of(without_largest_gaps([*blocks(0.01, 15), block(bad)])).value == pytest.approx(
        0.01
    )


def test_of_a_few_blocks_none_is_left_out():
    assert len(without_largest_gaps(blocks(0.01, 7))) == 7


def test_the_scale_error_is_that_of_a_temperature():
    # softmax(2 z) against softmax(z) over two tokens: r is exactly half of log mu, and a constant.
    logprobs = np.array([-0.5, -1.5, -3.0, -0.1] * 8)
    found = scale_error_of([block_of_tokens(0.02 * logprobs + 0.03, logprobs)] * 3)
    assert found.value == pytest.approx(0.02)
    assert found.error == pytest.approx(0.0, abs=1e-9)


def test_the_error_of_a_scale_error_is_that_of_repeated_samples():
    rng = np.random.default_rng(0)
    slopes, errors = [], []
    for _ in range(400):
        pool = []
        for _ in range(32):
            logprobs = -rng.exponential(1.5, 32)
            # Unlikely tokens differ by more, as rounding has it.
            pool.append(block_of_tokens(rng.normal(0, 0.02 * (0.2 - logprobs)), logprobs))
        found = scale_error_of(pool)
        slopes.append(found.value)
        errors.append(found.error)
    assert np.mean(slopes) == pytest.approx(0.0, abs=4e-4)
    assert np.mean(errors) == pytest.approx(np.std(slopes), rel=0.15)


def test_without_a_spread_of_log_probabilities_there_is_no_scale_error():
    assert scale_error_of([block_of_tokens([0.1, 0.2], [-1.0, -1.0])] * 2) is None
    assert scale_error_of([block_of_tokens([0.1, 0.2], [-1.0, -2.0])]) is None


def test_the_largest_of_each_block_show_the_99th_percentile():
    rng = np.random.default_rng(1)
    ratios = rng.standard_t(3, (4096, 32)) * 0.02
    pool = [block_of_tokens(row, -np.ones(32)) for row in ratios]
    assert gap_quantile(pool, 0.99) == pytest.approx(np.quantile(np.abs(ratios), 0.99), rel=0.05)


def test_bins_of_positions_double():
    places = [0, 31, 32, 63, 64, 127, 128, 1000]
    assert [position_bin(each) for each in places] == [0, 0, 32, 32, 64, 64, 128, 512]


def test_no_half_of_the_values_raises_the_lower_median_above_another():
    assert lower_median([math.nan, 0.02, math.inf, 0.01]) == 0.02
    assert math.isnan(lower_median([math.nan]))
