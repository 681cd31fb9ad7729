import math
from dataclasses import replace

import pytest
import torch

from tests.fixtures.learner.dispatcher import make_trajectory
from vcpo.algo import FreshTokens
from vcpo_learner.update.fresh_tokens import fresh_blocks


def response_of_versions(*versions):
    """A response with one token of each version, and its log ratios: 1, 2, 3, .."""
    return make_trajectory("lease", 0, versions=versions), torch.arange(
        1.0, len(versions) + 1, dtype=torch.float64
    )


def blocks_of(*versions, policy_version=8):
    trajectory, ratios = response_of_versions(*versions)
    return fresh_blocks([trajectory], ratios, policy_version)


def test_a_short_response_of_the_learners_version_is_one_block():
    found = blocks_of(8, 8, 8)
    assert (found.log_weights, found.num_tokens, found.absolute_log_ratios) == (
        (6.0,),
        (3,),
        (6.0,),
    )


def test_of_a_response_that_saw_a_swap_the_last_tokens_are_fresh():
    assert blocks_of(7, 7, 8, 8).log_weights == (7.0,)


def test_stretches_that_are_apart_are_blocks_of_their_own():
    # A resumed response keeps what an older learner's version sampled between.
    assert blocks_of(8, 7, 8, 8).log_weights == (1.0, 7.0)


@pytest.mark.parametrize("versions", [(7, 7), (9, 9), (0,)], ids=str)
def test_tokens_of_another_version_are_not_fresh(versions):
    found = blocks_of(*versions)
    assert (found.log_weights, found.tokens) == ((), {})


def test_a_long_span_is_split_into_blocks_of_about_32_tokens():
    found = blocks_of(*[8] * 100)
    assert found.num_tokens == (34, 33, 33)
    assert found.log_weights == (34 * 35 / 2, 33 * (35 + 67) / 2, 33 * (68 + 100) / 2)


@pytest.mark.parametrize("ratio", [math.nan, math.inf], ids=str)
def test_a_stretch_that_is_no_number_is_left_out(ratio):
    good, ratios = response_of_versions(8, 8)
    bad = torch.tensor([ratio, 0.0], dtype=torch.float64)
    assert fresh_blocks([good, good], torch.cat([bad, ratios]), 8).log_weights == (3.0,)


def test_a_weight_of_zero_is_handed_on():
    trajectory, _ = response_of_versions(8, 8)
    ratios = torch.tensor([-math.inf, 1.0], dtype=torch.float64)
    assert fresh_blocks([trajectory], ratios, 8).log_weights == (-math.inf,)


def test_blocks_of_two_sets_are_joined():
    both = blocks_of(8, 8).join(blocks_of(7, 8))
    assert (both.log_weights, both.num_tokens) == ((3.0, 2.0), (2, 1))
    assert both.tokens == {"": FreshTokens(num_blocks=2, num_tokens=3, absolute_log_ratio=5.0)}


def test_every_block_is_of_the_worker_that_sampled_it():
    trajectory, ratios = response_of_versions(*[8] * 64)
    a, b = replace(trajectory, worker_id="a"), replace(trajectory, worker_id="b")
    found = fresh_blocks([a, b], torch.cat([-ratios, ratios]), 8)
    assert found.workers == ("a", "a", "b", "b")
    first, rest = 32 * 33 / 2, 32 * (33 + 64) / 2
    assert found.log_weights == (-first, -rest, first, rest)
    gap = {"num_blocks": 2, "num_tokens": 64, "absolute_log_ratio": first + rest}
    assert found.tokens == {"a": FreshTokens(**gap), "b": FreshTokens(**gap)}


def test_a_response_of_several_workers_says_nothing_about_either():
    trajectory, ratios = response_of_versions(8, 8)
    resumed = replace(trajectory, worker_id=None)
    found = fresh_blocks([trajectory, resumed, trajectory], torch.cat([ratios] * 3), 8)
    assert (found.log_weights, found.workers) == ((3.0, 3.0), ("", ""))
