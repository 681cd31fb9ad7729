import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo.algo.ess.unit import block_log_weights, near_equal_blocks


@pytest.mark.parametrize(
    ("num_tokens", "size", "blocks"),
    [(10, 4, (5, 5)), (11, 4, (4, 4, 3)), (3, 100, (3,)), (4, 1, (1, 1, 1, 1))],
    ids=["two", "longer first", "one", "tokens"],
)
def test_a_trajectory_is_split_into_near_equal_blocks(num_tokens, size, blocks):
    assert near_equal_blocks(num_tokens, size) == blocks


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_blocks_add_up_and_differ_by_one_at_most(num_tokens, size):
    blocks = near_equal_blocks(num_tokens, size)
    assert sum(blocks) == num_tokens
    assert max(blocks) - min(blocks) <= 1


def test_a_block_weighs_the_product_of_its_tokens():
    assert block_log_weights([0.5, -0.25, 1.0], (2, 1)) == [0.25, 1.0]


def test_blocks_of_another_length_are_refused():
    with pytest.raises(ValueError, match="blocks add up to 2 tokens and log_ratios has 3"):
        block_log_weights([0.0, 0.0, 0.0], (1, 1))


def test_a_token_without_a_number_is_named():
    with pytest.raises(NonFiniteWeightError, match=r"log_ratios\[1\]"):
        block_log_weights([0.0, math.nan], (2,))
