import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vcpo_learner.estimator.clipping import (
    Band,
    active_within,
    balanced_band,
    second_moment_mask,
)

LOG_RATIOS = torch.tensor([0.05, -0.02, 0.6, -0.3, 0.1, -0.05], dtype=torch.float64)
PUSHED_OUT = LOG_RATIOS[[0, 2, 3, 4, 5]]
RATIOS = torch.tensor([1.5, 0.9, 0.5, 1.3], dtype=torch.float64)
SIGNS = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)

any_log_ratios = st.lists(st.floats(-5.0, 5.0), min_size=1, max_size=20).map(
    lambda row: torch.tensor(row, dtype=torch.float64)
)


def test_the_second_moment_of_tokens_pushed_out_drops_the_same():
    # Mean square .093 with .6, .0263 without.
    kept = second_moment_mask(PUSHED_OUT, 0.04)
    assert kept.tolist() == [True, False, True, True, True]


def test_every_token_may_be_dropped():
    far = torch.tensor([3.0, -2.0], dtype=torch.float64)
    assert second_moment_mask(far, 0.04).tolist() == [False, False]


def test_no_token_is_no_decision():
    assert second_moment_mask(torch.zeros(0), 0.04).tolist() == []


@given(any_log_ratios, st.floats(0.001, 2.0))
def test_what_is_kept_is_within_the_bound_and_one_more_would_not_be(log_ratios, bound):
    kept = second_moment_mask(log_ratios, bound)
    squares = log_ratios.square()
    if kept.any():
        assert float(squares[kept].mean()) <= bound * (1 + 1e-12)
    if not kept.all():
        larger = torch.cat([squares[kept], squares[~kept].min()[None]])
        assert float(larger.mean()) > bound * (1 - 1e-12)


def test_only_tokens_with_a_gradient_count_for_the_balance():
    # At (.6, 1.2): 1.5 up and .5 down are clipped, .9 / (.9 + 1.3) = .409. At (.6, 1.5):
    # (1.5 + .9) / 3.7 = .649. The upper end moves in steps of .05.
    assert balanced_band(RATIOS, SIGNS, 0.4) == Band(low=0.6, high=1.2)
    assert balanced_band(RATIOS, SIGNS, 0.6).high == pytest.approx(1.5)


def test_a_balance_out_of_reach_ends_at_the_widest_band():
    negative = -torch.ones(4, dtype=torch.float64)
    band = balanced_band(RATIOS, negative, 0.4)
    assert (band.low, band.high) == (0.9, 3.0)


def test_a_token_is_inactive_only_beyond_the_band_in_its_own_direction():
    band = Band(low=0.8, high=1.2)
    assert active_within(RATIOS, SIGNS, band).tolist() == [False, True, False, True]
