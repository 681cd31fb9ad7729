import json
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.learner.dispatcher import make_trajectory
from vcpo.wire.trajectory import FinishReason, Trajectory, VersionSpan
from vcpo_learner.update.fresh_tokens import fresh_blocks
from vcpo_learner.update.replay import (
    ReplayBuffer,
    ReplaySettings,
    draw,
    keep_newest,
    reward_weights,
)


def make_response(*tokens, version=0, then=None, reward=0.0, name="a"):
    """A response of these tokens, the last of them sampled by version `then` if one is given."""
    versions = [version] * (len(tokens) - 1) + [version if then is None else then]
    return Trajectory(
        trajectory_id=name,
        prompt_token_ids=(1, 2),
        response_token_ids=tokens,
        rollout_logprobs=(-0.5,) * len(tokens),
        version_spans=tuple(VersionSpan(policy_version=one, num_tokens=1) for one in versions),
        reward=reward,
        finish_reason=FinishReason.STOP,
    )


def first_draws(held, count, **settings):
    rng = random.Random(0)
    return [draw(held, 1, ReplaySettings(**settings), rng)[0] for _ in range(count)]


responses = st.lists(
    st.builds(
        lambda token, version, reward: make_response(token, version=version, reward=reward),
        st.integers(0, 8),
        st.integers(0, 3),
        st.floats(-1e4, 1e4),
    ),
    max_size=12,
)


def test_the_newest_responses_stay():
    one, two, three = make_response(1), make_response(2), make_response(3)
    assert keep_newest([one, two], [three], 2) == (two, three)


def test_of_two_equal_responses_the_later_stays_and_is_the_newest():
    early, other, late = make_response(1, version=0), make_response(2), make_response(1, version=5)
    assert keep_newest([early, other], [late], 8) == (other, late)


def test_a_response_that_begins_like_another_is_another():
    assert len(keep_newest([make_response(1)], [make_response(1, 2)], 8)) == 2


def test_a_group_is_of_the_most_recent_version_while_there_are_responses_of_it():
    held = [
        make_response(1, version=3),
        make_response(2, version=2, reward=9.0),
        make_response(3, version=3),
    ]
    group = draw(held, 2, ReplaySettings(on_policy_probability=1.0), random.Random(0))
    assert {each.response_token_ids for each in group} == {(1,), (3,)}


def test_older_responses_fill_up_a_group():
    held = [make_response(1, version=3), make_response(2, version=2)]
    settings = ReplaySettings(on_policy_probability=1.0)
    assert draw(held, 2, settings, random.Random(0)) == held


def test_a_response_is_as_recent_as_the_oldest_of_its_tokens():
    mixed, whole = make_response(1, 2, version=1, then=7), make_response(3, version=2)
    assert set(first_draws([mixed, whole], 50, on_policy_probability=1.0)) == {whole}


def test_responses_are_drawn_by_the_exponential_of_their_reward():
    # exp(0) to exp(2 * ln 3 / 2): one to three.
    held = [make_response(1), make_response(2, reward=math.log(3.0) / 2)]
    draws = first_draws(held, 2000, on_policy_probability=0.0, inverse_temperature=2.0)
    assert draws.count(held[1]) == pytest.approx(1500, abs=97)


def test_the_most_recent_are_drawn_with_their_probability_and_by_their_reward():
    # 1/2 for being recent, and half of the other half.
    held = [make_response(1, version=0), make_response(2, version=1)]
    draws = first_draws(held, 2000, on_policy_probability=0.5)
    assert draws.count(held[1]) == pytest.approx(1500, abs=97)


def test_at_inverse_temperature_0_rewards_do_not_matter():
    assert reward_weights([-5.0, 3.0], ReplaySettings(inverse_temperature=0.0)) == [1.0, 1.0]


def test_extreme_rewards_neither_overflow_nor_vanish():
    assert reward_weights([1e4, -1e4, 1e4], ReplaySettings()) == [1.0, 0.0, 1.0]


@given(responses, st.integers(0, 16), st.integers(0, 99))
def test_a_group_has_no_response_twice_and_is_as_large_as_can_be(found, count, seed):
    held = keep_newest([], found, 8)
    group = draw(held, count, ReplaySettings(), random.Random(seed))
    assert len({each.response_token_ids for each in group}) == len(group)
    assert len(group) == min(count, len(held))
    assert set(group) <= set(held)


@given(responses, st.integers(1, 8))
def test_what_is_kept_does_not_depend_on_how_it_arrived(found, capacity):
    singly: tuple[Trajectory, ...] = ()
    for each in found:
        singly = keep_newest(singly, [each], capacity)
    assert singly == keep_newest([], found, capacity)


def make_buffer(*, seed=0, **settings):
    return ReplayBuffer(ReplaySettings(**settings), seed=seed)


def test_every_group_is_exchanged_for_responses_to_its_own_prompt():
    buffer = make_buffer(on_policy_probability=0.0)
    other = [replace(make_response(token), prompt_token_ids=(9,)) for token in (5, 6)]
    groups = buffer.exchange([[make_response(1), make_response(2)], other])
    assert [{each.prompt_token_ids for each in group} for group in groups] == [{(1, 2)}, {(9,)}]


def test_a_buffer_restored_from_json_draws_as_the_first_would_have():
    first, second = make_buffer(), make_buffer(seed=7)
    arrived = [[make_response(token, reward=token / 9, version=token // 4) for token in range(9)]]
    first.exchange(arrived)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.responses_to((1, 2)) == first.responses_to((1, 2))
    later = [
        [make_response(20, version=9), make_response(21, version=9), make_response(22, version=9)]
    ]
    assert [second.exchange(later) for _ in range(3)] == [first.exchange(later) for _ in range(3)]


def test_a_smaller_buffer_keeps_the_newest_responses():
    buffer, smaller = make_buffer(), make_buffer(capacity_per_prompt=1)
    buffer.add([make_response(1), make_response(2)])
    smaller.load_state_dict(buffer.state_dict())
    assert smaller.responses_to((1, 2)) == (make_response(2),)


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
