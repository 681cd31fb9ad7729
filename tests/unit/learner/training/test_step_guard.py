"""Steps that fail, with a real model and its real update."""

import contextlib
from dataclasses import replace

import pytest
import torch

from tests.fixtures.learner.models import PAD, VOCABULARY, llama, seeded_model
from tests.fixtures.learner.updates import make_spec
from tests.unit.learner.training.groups import make_group
from vcpo.api import VCPORunSpec
from vcpo.service.lifecycle import StartError
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer
from vcpo_learner.training.quarantine import BrokenBatchError, Quarantine, StepGuard
from vcpo_learner.update.policy_update import PolicyUpdate


@pytest.fixture
def quarantine(tmp_path):
    return Quarantine(tmp_path)


def make_guard(quarantine):
    model = seeded_model(llama)
    return model, StepGuard(PolicyUpdate(model, make_spec(), PAD), quarantine)


def trainable_group(number, **changes):
    """A group that can be trained on: its two responses differ, and so do their rewards."""
    one = make_group(number, **changes)
    first, second = one.trajectories
    return replace(one, accepted={0: first, 1: replace(second, reward=0.0)})


def take_step(guard, groups, *, newest=(), policy_version):
    guard.begin(groups, policy_version=policy_version)
    return guard.finish(newest)


POISON = trainable_group(2, response_token_ids=(VOCABULARY + 5,))


def test_the_group_that_breaks_a_step_is_named_and_the_others_are_still_trained_on(quarantine):
    model, guard = make_guard(quarantine)
    before = [each.clone() for each in model.parameters()]
    with pytest.raises(BrokenBatchError) as caught:
        take_step(guard, [trainable_group(1), POISON, trainable_group(3)], policy_version=0)
    (lease_id, reason), *others = caught.value.reasons.items()
    assert (lease_id, others) == ("train-now-2", [])
    assert reason.startswith("IndexError: index out of range")
    assert all(map(torch.equal, before, model.parameters()))
    assert all(each.grad is None for each in model.parameters())
    assert (
        take_step(guard, [trainable_group(1), trainable_group(3)], policy_version=0).skipped is None
    )
    assert not all(map(torch.equal, before, model.parameters()))


def test_a_learner_that_survives_a_broken_step_counts_no_death(quarantine, tmp_path):
    _, guard = make_guard(quarantine)
    with pytest.raises(BrokenBatchError):
        take_step(guard, [POISON], policy_version=0)
    assert list(tmp_path.iterdir()) == []


def test_a_response_beside_the_batch_that_breaks_the_step_costs_the_batch_nothing(quarantine):
    model, guard = make_guard(quarantine)
    before = [each.clone() for each in model.parameters()]
    result = take_step(guard, [trainable_group(1)], newest=POISON.trajectories, policy_version=0)
    assert (result.skipped, result.fresh[""].num_blocks) == (None, 2)
    assert not all(map(torch.equal, before, model.parameters()))


class BrokenUpdate:
    """Breaks at every batch, and alone at the groups it is told to."""

    def __init__(self, error, *, alone=(), is_whole=True):
        self.error, self.alone, self.is_whole = error, alone, is_whole

    def begin(self, groups, *, policy_version):
        raise self.error

    def rehearse(self, group, *, policy_version):
        if group[0].trajectory_id.rpartition("/")[0] in self.alone:
            raise self.error

    def draw(self, groups):
        return groups


GROUPS = [trainable_group(1), trainable_group(2)]
EVERY_ID = [one.lease_id for one in GROUPS]


def take_broken_steps(guard, count):
    for _ in range(count):
        with contextlib.suppress(BrokenBatchError):
            take_step(guard, GROUPS, policy_version=0)


def test_when_no_group_breaks_it_alone_all_of_them_go(quarantine):
    guard = StepGuard(BrokenUpdate(ValueError("odd")), quarantine)
    with pytest.raises(BrokenBatchError) as caught:
        take_step(guard, GROUPS, policy_version=0)
    assert caught.value.reasons == dict.fromkeys(EVERY_ID, "ValueError: odd, in a batch")


def test_a_step_that_broke_after_it_changed_something_ends_the_learner_and_leaves_its_note(
    quarantine, tmp_path
):
    guard = StepGuard(BrokenUpdate(ValueError("half"), is_whole=False), quarantine)
    with pytest.raises(ValueError, match="half"):
        take_step(guard, GROUPS, policy_version=0)
    assert Quarantine(tmp_path).deaths("train-now-1") == 1


def test_a_step_that_breaks_in_the_optimizer_is_half_taken(quarantine, monkeypatch):
    model = seeded_model(llama)
    update = PolicyUpdate(model, make_spec(), PAD)

    def broken(*_):
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(PolicyOptimizer, "step", broken)
    with pytest.raises(RuntimeError, match="device-side assert"):
        take_step(StepGuard(update, quarantine), [trainable_group(1)], policy_version=0)
    assert not update.is_whole


@pytest.mark.parametrize("alone", [(), EVERY_ID], ids=["none", "all"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), MemoryError("host")])
def test_memory_that_no_group_alone_is_to_blame_for_is_the_users_to_save(quarantine, alone, error):
    guard = StepGuard(BrokenUpdate(error, alone=alone), quarantine)
    with pytest.raises(StartError, match=r"lower spec\.batch\.tokensPerMicroBatch"):
        take_step(guard, GROUPS, policy_version=0)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), ValueError("odd")])
def test_a_run_that_ends_with_a_sentence_counts_no_death(quarantine, tmp_path, error):
    quarantine.begin_step(EVERY_ID)
    found = Quarantine(tmp_path)  # as a successor of a learner that died once
    guard = StepGuard(BrokenUpdate(error), found)
    with pytest.raises(StartError):
        take_broken_steps(guard, 3)
    assert list(tmp_path.iterdir()) == []


def test_the_note_stays_while_groups_are_tried_one_by_one(quarantine, tmp_path):
    class DyingUpdate(BrokenUpdate):
        def rehearse(self, group, *, policy_version):
            raise KeyboardInterrupt

    guard = StepGuard(DyingUpdate(ValueError("odd")), quarantine)
    with pytest.raises(KeyboardInterrupt):
        take_step(guard, GROUPS, policy_version=0)
    assert Quarantine(tmp_path).deaths("train-now-1") == 1


def test_a_group_that_alone_is_too_large_goes(quarantine):
    guard = StepGuard(BrokenUpdate(MemoryError("large"), alone=["train-now-2"]), quarantine)
    with pytest.raises(BrokenBatchError) as caught:
        take_step(guard, GROUPS, policy_version=0)
    assert caught.value.reasons == {"train-now-2": "MemoryError: large"}


def test_the_third_broken_batch_in_a_row_ends_the_run_with_the_reason(quarantine):
    guard = StepGuard(BrokenUpdate(ValueError("odd")), quarantine)
    take_broken_steps(guard, 2)
    with pytest.raises(
        StartError,
        match="the update failed on 3 batches in a row, on the last one with ValueError: odd; the"
        " groups of the 2 batches before are in the quarantine folder",
    ):
        take_step(guard, GROUPS, policy_version=0)


def group_of_pairs(number, *responses):
    """A group with a response for each pair of its only token and its reward."""
    one = make_group(number)
    (head, _) = one.trajectories
    members = [
        replace(
            head,
            trajectory_id=f"{one.lease_id}/{at}",
            response_token_ids=(token,),
            reward=reward,
        )
        for at, (token, reward) in enumerate(responses)
    ]
    return replace(one, accepted=dict(enumerate(members)))


PRIZED = group_of_pairs(1, (5, 500.0), (6, 501.0))
HIDDEN = group_of_pairs(2, (VOCABULARY + 5, 100.0), (7, 0.0))
"""Rewards weigh exponentially: a group of two is drawn of the prized responses, a third is this."""
LARGER = group_of_pairs(3, (8, 0.0), (9, 0.0), (10, 0.0))


def replay_guard(quarantine):
    """A guard over responses kept, of which one breaks the step in which it is drawn."""
    document = make_spec().model_dump(by_alias=True)
    algorithm = {"method": "tba", "onPolicyEssRatio": 1.0, "onPolicyProbability": 0.0}
    batch = {**document["batch"], "promptPool": 9}
    document = {**document, "algorithm": algorithm, "batch": batch}
    update = PolicyUpdate(seeded_model(llama), VCPORunSpec.model_validate(document), PAD)
    guard = StepGuard(update, quarantine)
    for version, one in enumerate([PRIZED, HIDDEN]):
        take_step(guard, [one], policy_version=version)
    return update, guard


def test_a_kept_response_that_breaks_a_step_goes_and_the_groups_that_arrived_stay(quarantine):
    update, guard = replay_guard(quarantine)
    with pytest.raises(BrokenBatchError) as caught:
        take_step(guard, [LARGER], policy_version=2)
    ((lease_id, reason),) = caught.value.reasons.items()
    assert (lease_id, reason.partition(":")[0]) == ("train-now-2", "IndexError")
    assert update.forget(caught.value.reasons) == {"train-now-2": HIDDEN.trajectories}
    result = take_step(guard, [LARGER], policy_version=2)
    assert (result.skipped, result.reward_mean) == (None, pytest.approx(1001 / 3))


def test_the_note_of_a_step_names_the_groups_whose_kept_responses_it_is_taken_on(
    quarantine, tmp_path, monkeypatch
):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    update, guard = replay_guard(quarantine)
    monkeypatch.setattr(update, "begin", interrupt)
    with pytest.raises(KeyboardInterrupt):
        take_step(guard, [LARGER], policy_version=2)
    found = Quarantine(tmp_path)
    assert [found.deaths(f"train-now-{number}") for number in (1, 2, 3)] == [1, 1, 1]
