import math
from dataclasses import replace

import pytest
import torch

from tests.fixtures.learner.dispatcher import make_trajectory
from vcpo.wire.trajectory import VersionSpan
from vcpo_learner.update.fresh_tokens import fresh_blocks

NEWEST = VersionSpan(policy_version=8, num_tokens=1)


def response_of_versions(*versions):
    """A response with one token of each version, and its log ratios: 1, 2, 3, .."""
    return make_trajectory("lease", 0, versions=versions), torch.arange(
        1.0, len(versions) + 1, dtype=torch.float64
    )


def found_in(trajectories, ratios, policy_version=8):
    return fresh_blocks(trajectories, ratios, policy_version, -torch.ones_like(ratios))


def log_weights(blocks):
    return [block.log_ratio for block in blocks]


def blocks_of(*versions, policy_version=8):
    trajectory, ratios = response_of_versions(*versions)
    return found_in([trajectory], ratios, policy_version)


def test_a_short_response_of_the_learners_version_is_one_block():
    found = blocks_of(8, 8, 8)
    (block,) = found
    assert (block.log_ratio, block.num_tokens, block.position) == (6.0, 3, 0)
    assert (block.absolute_log_ratio, block.largest) == (6.0, 3.0)
    # exp(r) - 1 - r at 1, 2 and 3.
    assert block.divergence == pytest.approx(sum(math.exp(r) - 1 - r for r in (1, 2, 3)))


def test_of_a_response_that_saw_a_swap_the_last_tokens_are_fresh():
    assert log_weights(blocks_of(7, 7, 8, 8)) == [7.0]


def test_tokens_that_read_older_keys_are_not_fresh():
    trajectory, ratios = response_of_versions(7, 8, 8, 8)
    spans = [replace(span, key_age_versions=1) for span in trajectory.version_spans[1:3]]
    kept = replace(trajectory, version_spans=(trajectory.version_spans[0], *spans, NEWEST))
    assert (kept.num_fresh_tokens(7), kept.num_fresh_tokens(8)) == (1, 1)
    assert log_weights(found_in([kept], ratios)) == [4.0]


def test_stretches_that_are_apart_are_blocks_of_their_own():
    # A resumed response keeps what an older learner's version sampled between.
    assert log_weights(blocks_of(8, 7, 8, 8)) == [1.0, 7.0]


@pytest.mark.parametrize("versions", [(7, 7), (9, 9), (0,)], ids=str)
def test_tokens_of_another_version_are_not_fresh(versions):
    assert blocks_of(*versions) == ()


def test_a_long_span_is_split_into_blocks_of_about_32_tokens():
    found = blocks_of(*[8] * 100)
    assert [block.num_tokens for block in found] == [34, 33, 33]
    assert log_weights(found) == [34 * 35 / 2, 33 * (35 + 67) / 2, 33 * (68 + 100) / 2]


@pytest.mark.parametrize("ratio", [math.nan, math.inf], ids=str)
def test_a_stretch_that_is_no_number_is_left_out(ratio):
    good, ratios = response_of_versions(8, 8)
    bad = torch.tensor([ratio, 0.0], dtype=torch.float64)
    assert log_weights(found_in([good, good], torch.cat([bad, ratios]))) == [3.0]


def test_a_weight_of_zero_is_handed_on():
    trajectory, _ = response_of_versions(8, 8)
    ratios = torch.tensor([-math.inf, 1.0], dtype=torch.float64)
    assert log_weights(found_in([trajectory], ratios)) == [-math.inf]


def test_every_block_is_of_the_worker_that_sampled_it():
    trajectory, ratios = response_of_versions(*[8] * 64)
    a, b = replace(trajectory, worker_id="a"), replace(trajectory, worker_id="b")
    found = found_in([a, b], torch.cat([-ratios, ratios]))
    assert [block.worker for block in found] == ["a", "a", "b", "b"]
    first, rest = 32 * 33 / 2, 32 * (33 + 64) / 2
    assert log_weights(found) == [-first, -rest, first, rest]
    assert [block.absolute_log_ratio for block in found] == [first, rest] * 2
    assert [block.position for block in found] == [0, 32] * 2


def test_a_block_holds_the_log_probabilities_of_its_own_tokens():
    trajectory, ratios = response_of_versions(7, 8, 8)
    logprobs = torch.tensor([-5.0, -1.0, -3.0])
    (block,) = fresh_blocks([trajectory], ratios, 8, logprobs)
    # Tokens 1 and 2 of the answer, with log ratios 2 and 3.
    assert (block.position, block.logprob, block.logprob_square) == (1, -4.0, 10.0)
    assert block.logprob_log_ratio == -1.0 * 2 - 3.0 * 3


def test_a_response_of_several_workers_says_nothing_about_either():
    trajectory, ratios = response_of_versions(8, 8)
    resumed = replace(trajectory, worker_id=None)
    found = found_in([trajectory, resumed, trajectory], torch.cat([ratios] * 3))
    assert [(block.log_ratio, block.worker) for block in found] == [(3.0, ""), (3.0, "")]
