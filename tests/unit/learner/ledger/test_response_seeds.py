"""A group keeps the seed and the numbers of its responses, whoever samples them and how often."""

from dataclasses import replace

import pytest

from tests.fixtures.learner.dispatcher import (
    TIMEOUT_S,
    make_ledger,
    make_partial_response,
    make_run,
    make_trajectories,
    make_trajectory,
)
from vcpo.records.reasons import DropReason
from vcpo.wire.errors import InvalidMessageError
from vcpo_learner.ledger.evaluation import EvaluationRound
from vcpo_learner.ledger.lease import Purpose


def grant(ledger, count=1, **details):
    return ledger.grant("w", num_groups=count, policy_version=0, **details)


def restart(ledger, clock, incarnation="later"):
    """The ledger of the next process."""
    after = make_ledger(clock, incarnation=incarnation)
    after.restore(tuple(ledger.snapshot().parts()))
    after.restart()
    return after


def seed_of(lease, purpose=Purpose.TRAIN):
    return replace(lease, purpose=purpose).seed(7)


def test_every_group_has_a_seed_of_its_own(ledger):
    leases = grant(ledger, 3)
    assert len({seed_of(lease) for lease in leases}) == 3
    assert len({leases[0].seed(at) for at in (1, 2)}) == 2


def test_a_lease_that_is_lost_changes_no_seed_of_the_groups_after_it(ledger, clock):
    undisturbed = make_ledger(clock)
    expected = [seed_of(lease) for lease in grant(undisturbed, 4)]
    first, second = grant(ledger, 2)
    ledger.release("w", [])
    again = grant(ledger, 2)
    assert {lease.prompt_index for lease in again} == {first.prompt_index, second.prompt_index}
    (third,) = grant(ledger)
    after = restart(ledger, clock)
    grant(after, 3)
    (fourth,) = grant(after)
    assert [third.prompt_index, fourth.prompt_index] == [2, 3]
    assert [seed_of(third), seed_of(fourth)] == expected[2:]


def test_a_learner_that_restarts_asks_for_the_missing_responses_under_their_numbers(ledger, clock):
    (first,) = grant(ledger)
    ledger.submit(first.lease_id, [make_trajectory(first.lease_id, 0)])
    after = restart(ledger, clock)
    (second,) = grant(after)
    assert seed_of(second) == seed_of(first)
    assert second.response_numbers == (1,)
    third_learner = restart(after, clock, "last")
    (third,) = grant(third_learner)
    assert (seed_of(third), third.response_numbers) == (seed_of(first), (1,))
    third_learner.submit(third.lease_id, make_trajectories(third))
    (group,) = third_learner.buffer.groups()
    assert [each.trajectory_id for each in group.trajectories] == [
        f"{first.lease_id}/0",
        f"{third.lease_id}/1",
    ]


def test_a_failed_generation_is_followed_by_other_responses(ledger):
    (first,) = grant(ledger)
    ledger.fail(first.lease_id)
    (again,) = grant(ledger)
    assert again.prompt_index == first.prompt_index
    assert seed_of(again) != seed_of(first)


def lose_with_worker(ledger, clock, lease):
    """The host says that the worker died."""
    ledger.release(lease.worker_id, [])


def outlast(ledger, clock, lease):
    clock.advance(TIMEOUT_S)
    ledger.expire()


@pytest.mark.parametrize("lose", [lose_with_worker, outlast])
def test_responses_that_never_come_are_drawn_once_more_and_then_others(ledger, clock, lose):
    seeds = []
    for _ in range(6):
        (lease,) = grant(ledger)
        seeds.append(seed_of(lease))
        lose(ledger, clock, lease)
    first, second, third = seeds[::2]
    assert seeds[1::2] == [first, second, third]
    assert len({first, second, third}) == 3


def test_a_worker_that_hands_over_what_it_sampled_never_changes_the_draw(ledger):
    seeds = set()
    for _ in range(5):
        (lease,) = grant(ledger)
        seeds.add(seed_of(lease))
        ledger.release("w", [lease.lease_id], [make_partial_response(0)])
    assert len(seeds) == 1


def test_a_preempted_lease_never_changes_the_draw(ledger):
    seeds = set()
    for _ in range(5):
        (lease,) = grant(ledger)
        seeds.add(seed_of(lease))
        ledger.preempt(2)
        ledger.release("w", [lease.lease_id])
    assert len(seeds) == 1


@pytest.mark.parametrize("is_failed_before", [True, False])
def test_a_restart_of_the_learner_keeps_the_draw(ledger, clock, is_failed_before):
    (lease,) = grant(ledger)
    first = seed_of(lease)
    if is_failed_before:
        ledger.fail(lease.lease_id)
        (lease,) = grant(ledger)
    for number in range(3):
        later = restart(ledger, clock, f"later{number}")
        (again,) = grant(later)
        assert seed_of(again) == seed_of(lease)
        assert (seed_of(again) != first) is is_failed_before
        assert again.failures == 0
        ledger = later


def test_a_group_that_was_dropped_is_followed_by_other_responses(ledger):
    (first,) = grant(ledger)
    ledger.submit(first.lease_id, make_trajectories(first, versions=(0,)))
    ledger.drop_late(step=9, max_policy_lag_steps=1)
    assert ledger.counts().dropped == {DropReason.LAG_EXCEEDED: 2}
    (again,) = grant(ledger)
    assert again.prompt_index == first.prompt_index
    assert seed_of(again) != seed_of(first)


@pytest.mark.parametrize(("numbers", "refused"), [((0, 0), "begun[1]"), ((0, 2), "begun[1]")])
def test_a_partial_response_with_another_number_is_refused(ledger, numbers, refused):
    (lease,) = grant(ledger)
    partials = [make_partial_response(0, number=number) for number in numbers]
    with pytest.raises(InvalidMessageError) as caught:
        ledger.release("w", [lease.lease_id], partials)
    assert caught.value.field == f"{refused}.number"
    assert ledger.leases.held_by("w") == [lease]


def make_round(clock, *, step):
    """A round of one prompt with three responses."""
    run = make_run(
        evaluation={"prompts": 1, "samplesPerPrompt": 3}, lease={"timeoutSeconds": TIMEOUT_S}
    )
    return EvaluationRound(run.spec, step=step, incarnation="now", clock=clock)


def evaluate(clock, *, step):
    """Leases of one worker for a prompt with three responses, two at a time."""
    evaluation = make_round(clock, step=step)
    return [
        lease
        for room in (2, 2)
        for lease in evaluation.grant("w", max_trajectories=room, policy_version=step)
    ]


@pytest.mark.parametrize(("how", "num_draws"), [("expired", 3), ("released", 3), ("failed", 3)])
def test_an_evaluation_does_not_draw_for_ever_what_never_comes(clock, how, num_draws):
    evaluation, seeds = make_round(clock, step=5), []
    for _ in range(3 if how == "failed" else 6):
        (lease,) = evaluation.grant("w", max_trajectories=3, policy_version=5)
        seeds.append(seed_of(lease, Purpose.EVALUATION))
        if how == "expired":
            clock.advance(TIMEOUT_S)
            evaluation.expire()
        elif how == "released":
            evaluation.release("w", [])
        else:
            evaluation.fail(lease.lease_id)
    assert len(set(seeds)) == num_draws
    assert (seeds[0] == seeds[1]) is (how != "failed")


def test_an_evaluation_that_is_split_has_one_seed_and_another_than_the_next(clock):
    first, rest = evaluate(clock, step=0)
    assert (first.response_numbers, rest.response_numbers) == ((0, 1), (2,))
    assert seed_of(first, Purpose.EVALUATION) == seed_of(rest, Purpose.EVALUATION)
    assert seed_of(first, Purpose.EVALUATION) != seed_of(first)
    later, _ = evaluate(clock, step=5)
    assert seed_of(later, Purpose.EVALUATION) != seed_of(first, Purpose.EVALUATION)
