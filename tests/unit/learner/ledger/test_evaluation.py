from dataclasses import replace

import pytest

from tests.fixtures.learner.dispatcher import TIMEOUT_S, make_run, make_trajectories, prompts
from vcpo.records.journal import EvaluationRecord
from vcpo_learner.ledger.evaluation import EvaluationRound


@pytest.fixture
def make_round(clock):
    def make(*, num_prompts=2, samples_per_prompt=1):
        return EvaluationRound(
            make_run(
                evaluation={"prompts": num_prompts, "samplesPerPrompt": samples_per_prompt}
            ).spec,
            step=7,
            incarnation="now",
            clock=clock,
        )

    return make


def answers_to(lease, **details):
    return make_trajectories(lease, prompt_token_ids=(3, lease.prompt_index), **details)


def grant(round_, room, *, worker="w"):
    return round_.grant(worker, max_trajectories=room, policy_version=7)


def test_every_held_out_prompt_is_leased_once(make_round):
    round_ = make_round(num_prompts=3)
    assert prompts(grant(round_, 2) + grant(round_, 9)) == [0, 1, 2]
    assert grant(round_, 9) == []


def test_a_prompt_that_does_not_fit_a_worker_is_shared_between_leases(make_round):
    round_ = make_round(num_prompts=2, samples_per_prompt=3)
    leases = grant(round_, 2) + grant(round_, 3) + grant(round_, 3)
    sizes = [(lease.prompt_index, lease.num_trajectories) for lease in leases]
    assert sizes == [(0, 2), (0, 1), (1, 2), (1, 1)]


def test_the_result_is_the_mean_reward_and_the_range_of_versions(make_round):
    round_ = make_round()
    first, second = grant(round_, 2)
    round_.submit(first.lease_id, answers_to(first, reward=1.0, versions=(6, 7)))
    round_.submit(second.lease_id, answers_to(second, reward=0.5, versions=(7, 9)))
    record = replace(round_.result().record, time_unix_s=0.0)
    assert record == EvaluationRecord(
        step=7,
        time_unix_s=0.0,
        accuracy=0.75,
        num_prompts=2,
        num_trajectories=2,
        policy_version_min=6,
        policy_version_max=9,
    )


def test_a_prompt_that_repeats_another_counts_for_nothing(make_round):
    round_ = make_round(num_prompts=5, samples_per_prompt=2)
    for lease in grant(round_, 10):
        asked, reward = ((1,), 1.0) if lease.prompt_index % 2 else ((2,), 0.5)
        reward *= lease.prompt_index < 2
        answers = make_trajectories(lease, reward=reward, prompt_token_ids=asked)
        round_.submit(lease.lease_id, answers)
    result = round_.result().record
    assert (result.accuracy, result.num_prompts, result.num_trajectories) == (0.75, 2, 4)


def test_one_response_to_each_of_the_first_eight_prompts_is_kept_to_be_shown(make_round):
    round_ = make_round(num_prompts=9, samples_per_prompt=2)
    leases = grant(round_, 18)
    answers = {lease.prompt_index: answers_to(lease) for lease in leases}
    for lease in reversed(leases):  # as answers may arrive
        round_.submit(lease.lease_id, answers[lease.prompt_index])
    kept = round_.result().first_responses
    assert [(prompt, one.trajectory_id) for prompt, one in kept.items()] == [
        (prompt, answers[prompt][0].trajectory_id) for prompt in range(8)
    ]


def test_a_reward_that_is_far_from_the_others_makes_no_evaluation_the_best(make_round):
    round_ = make_round(num_prompts=12)
    rewards = [1.0, 0.0] * 5 + [1.0, 1e4]
    for lease, reward in zip(grant(round_, 12), rewards, strict=True):
        round_.submit(lease.lease_id, answers_to(lease, reward=reward))
    assert round_.result().record.accuracy == pytest.approx(6 / 11)


def test_an_expired_prompt_is_leased_to_somebody_else(make_round, clock):
    round_ = make_round(num_prompts=1)
    (lost,) = grant(round_, 1)
    clock.advance(TIMEOUT_S)
    assert len(round_.expire()) == 1
    assert round_.submit(lost.lease_id, make_trajectories(lost)) == ["lease_ended"]
    assert prompts(grant(round_, 1, worker="other")) == [0]


def test_a_prompt_is_given_up_after_its_last_failed_attempt(make_round):
    round_ = make_round(num_prompts=1)
    for _ in range(3):
        assert not round_.done
        (lease,) = grant(round_, 1)
        round_.fail(lease.lease_id)
    assert round_.done
    assert round_.result() is None


def test_a_released_prompt_has_not_failed(make_round):
    round_ = make_round(num_prompts=1)
    for _ in range(5):
        (lease,) = grant(round_, 1)
        assert (lease.failures, round_.release("w", [])) == (0, 1)
