import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcpo_learner.prompts.posterior import PosteriorSettings, PromptPosterior

observations = st.lists(
    st.tuples(
        st.integers(0, 4), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4), st.integers(0, 60)
    ),
    max_size=12,
)


def posterior(*seen, half_life_versions=8.0, exploration=0.0):
    """What is known after observations (prompt index, rewards, policy version)."""
    settings = PosteriorSettings(half_life_versions=half_life_versions, exploration=exploration)
    known = PromptPosterior(settings)
    for index, rewards, version in seen:
        known.observe(index, rewards, policy_version=version)
    return known


def choices(known, candidates, count):
    rng = random.Random(0)
    return [known.choose(candidates, rng) for _ in range(count)]


def half_solved(index):
    return index, [1.0, 0.0] * 200, 0


def unsolved_prompt(index):
    return index, [0.0] * 400, 0


def success_rate(evidence):
    """Mean of the Beta distribution with one success and one failure more."""
    return (1.0 + evidence.successes) / (2.0 + evidence.successes + evidence.failures)


def test_an_unseen_prompt_is_as_likely_solved_as_not():
    assert success_rate(posterior().evidence(7)) == 0.5


def test_three_successes_of_four_make_two_thirds():
    # (1 + 3) / (2 + 4)
    assert success_rate(posterior((7, [1.0, 1.0, 1.0, 0.0], 0)).evidence(7)) == pytest.approx(2 / 3)


def test_a_reward_between_0_and_1_is_a_part_of_a_success():
    evidence = posterior((7, [0.25, 0.75, 0.75], 0)).evidence(7)
    assert (evidence.successes, evidence.failures) == (1.75, 1.25)


def test_a_response_counts_half_after_a_half_life():
    # The other prompt's response says that version 8 is here.
    evidence = posterior((7, [1.0, 1.0, 1.0, 0.0], 0), (1, [1.0], 8)).evidence(7)
    assert (evidence.successes, evidence.failures) == (1.5, 0.5)


def test_a_late_response_of_an_older_version_counts_as_if_it_had_come_in_time():
    # Version 8 is two half-lives before 24.
    evidence = posterior((7, [1.0], 24), (7, [0.0], 8)).evidence(7)
    assert (evidence.successes, evidence.failures) == (1.0, 0.25)


def test_without_forgetting_the_first_response_counts_as_the_last():
    known = posterior((7, [1.0], 0), (7, [0.0, 0.0], 10**6), half_life_versions=float("inf"))
    assert success_rate(known.evidence(7)) == 0.4  # (1 + 1) / (2 + 3)


def test_what_is_long_ago_is_forgotten_altogether():
    known = posterior(unsolved_prompt(7), (1, [1.0], 10**6))
    assert success_rate(known.evidence(7)) == 0.5


def test_a_half_solved_prompt_is_chosen_before_decided_ones():
    known = posterior(unsolved_prompt(1), half_solved(2), (3, [1.0] * 400, 0))
    assert set(choices(known, [1, 2, 3], 200)) == {2}


def test_an_unseen_prompt_is_chosen_before_a_decided_one():
    # The unsolved prompt wins where both draws are about 0: less than 1 in 100.
    assert choices(posterior(unsolved_prompt(1)), [1, 2], 1000).count(2) > 970


def test_an_unseen_prompt_wins_now_and_then_against_a_half_solved_one():
    # Mean |p - 1/2| of Beta(201, 201) is 0.0199; a uniform p is nearer with twice that chance.
    wins = choices(posterior(half_solved(1)), [1, 2], 2000).count(2)
    assert wins == pytest.approx(2000 * 0.0398, abs=45)


def test_exploration_chooses_uniformly():
    known = posterior(unsolved_prompt(1), half_solved(2), exploration=1.0)
    assert choices(known, [1, 2], 2000).count(1) == pytest.approx(1000, abs=112)


def test_no_candidate_is_refused():
    with pytest.raises(ValueError, match="candidates is empty"):
        posterior().choose([], random.Random(0))


@pytest.mark.parametrize("reward", [-0.1, 1.5, float("nan")], ids=str)
def test_a_reward_that_is_no_share_of_a_success_is_refused_and_nothing_is_learned(reward):
    known = posterior()
    with pytest.raises(ValueError, match=f"reward of prompt 7 is {reward}"):
        known.observe(7, [1.0, reward], policy_version=0)
    assert known.to_dict()["prompts"] == []


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")], ids=str)
def test_a_half_life_that_does_not_pass_is_refused(value):
    with pytest.raises(ValueError, match="half_life_versions is"):
        PosteriorSettings(half_life_versions=value)


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")], ids=str)
def test_an_exploration_that_is_no_share_is_refused(value):
    with pytest.raises(ValueError, match="exploration is"):
        PosteriorSettings(exploration=value)


def test_the_state_holds_the_prompts_that_were_seen():
    assert posterior((9, [1.0, 0.0, 0.0], 4), (2, [0.5], 3)).to_dict() == {
        "newest_version": 4,
        "prompts": [[2, 0.5, 0.5, 3], [9, 1.0, 2.0, 4]],
    }


@given(observations)
def test_one_restored_from_json_knows_and_chooses_the_same(seen):
    known = posterior(*seen)
    state = json.loads(json.dumps(known.to_dict()))
    settings = PosteriorSettings(half_life_versions=8.0, exploration=0.0)
    restored = PromptPosterior.from_dict(state, settings)
    assert restored.to_dict() == known.to_dict()
    assert choices(restored, range(5), 10) == choices(known, range(5), 10)


@given(observations, st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_nothing(seen, order):
    shuffled = posterior(*order.sample(seen, len(seen)))
    for index in range(5):
        expected, evidence = posterior(*seen).evidence(index), shuffled.evidence(index)
        assert evidence.successes == pytest.approx(expected.successes, rel=1e-9, abs=1e-12)
        assert evidence.failures == pytest.approx(expected.failures, rel=1e-9, abs=1e-12)


@given(observations)
def test_the_counts_are_sums_of_responses_by_age(seen):
    newest = max((version for _, _, version in seen), default=0)
    for index in range(5):
        responses = [(r, v) for i, rewards, v in seen if i == index for r in rewards]
        expected = sum(reward * 0.5 ** ((newest - version) / 8.0) for reward, version in responses)
        assert posterior(*seen).evidence(index).successes == pytest.approx(expected, abs=1e-9)
