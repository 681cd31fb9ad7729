import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo.wire.trajectory import FinishReason, Trajectory, VersionSpan
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
