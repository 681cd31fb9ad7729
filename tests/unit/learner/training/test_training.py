import resource
import threading

import pytest

from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.learner.dispatcher import work_request
from tests.fixtures.learner.training import MemoryLog
from vcpo.records.exported_model import ExportedModel
from vcpo.records.journal import read_events, read_metrics
from vcpo.service.lifecycle import StartError
from vcpo.wire.phase import RunPhase


def break_begin(learner, times, error=None):
    """Let the first gradients fail; return the leases of their batches."""
    begin, broken = learner.update.begin, []

    def begin_or_fail(groups, *, policy_version):
        if len(broken) < times:
            broken.append({each.lease_id for group in groups for each in group})
            raise error or ValueError("odd")
        return begin(groups, policy_version=policy_version)

    learner.update.begin = begin_or_fail
    return broken


def dropped(tmp_path):
    return [event.message for event in read_events(tmp_path) if event.kind == "GroupsDropped"]


async def test_a_batch_that_breaks_the_update_is_dropped_and_the_run_goes_on(
    make_learner, tmp_path
):
    learner = make_learner(steps=3)
    broken = break_begin(learner, 2)
    assert await learner.run() is RunPhase.COMPLETE
    last = read_metrics(tmp_path).steps[-1]
    assert (last.step, last.consumed, last.dropped) == (3, 12, {"quarantined": 8})
    for ids, message in zip(broken, dropped(tmp_path), strict=True):
        assert message.startswith("ValueError: odd; these groups are not trained on: ")
        assert all(lease_id in message for lease_id in ids)


async def test_the_third_broken_batch_in_a_row_ends_the_run_with_the_reason(make_learner, tmp_path):
    learner = make_learner(steps=3)
    break_begin(learner, 3, MemoryError("large"))
    with pytest.raises(StartError, match=r"failed on 3 batches in a row.*MemoryError: large"):
        await learner.run()
    assert len(dropped(tmp_path)) == 3


async def test_a_step_that_broke_after_it_changed_something_ends_the_learner(make_learner):
    learner = make_learner(steps=3)
    break_begin(learner, 1)
    learner.update.is_whole = False
    with pytest.raises(ValueError, match="odd"):
        await learner.run()


async def test_a_response_beside_the_batch_that_breaks_the_step_costs_the_batch_nothing(
    make_learner, tmp_path
):
    learner = make_learner(steps=3)
    learner.update.wanted_fresh_tokens, finish, refused = 10**6, learner.update.finish, []

    def finish_or_fail(newest=()):
        if newest:
            refused.append(newest)
            raise ValueError("odd")
        return finish(newest)

    learner.update.finish = finish_or_fail
    learner.accept(*await learner.dispatcher.lease(work_request(), wait_s=0))
    assert await learner.run() is RunPhase.COMPLETE
    assert refused
    assert not dropped(tmp_path)


DEADLINE_S = 30.0


def published_versions(learner):
    """The versions in the order of their announcement."""
    policies = learner.policies
    publish, seen = policies.publish, []

    def observed(prepared):
        publish(prepared)
        seen.append(prepared.manifest.policy_version)

    policies.publish = observed
    return seen


async def test_the_next_step_begins_while_a_version_is_prepared(make_learner):
    learner = make_learner(algorithm={"maxPolicyLagSteps": 4})
    policies = learner.policies
    prepare, begin = policies.prepare, learner.update.begin
    stepping, in_time = threading.Event(), []

    def prepare_late(version, weights):
        if version == 1:  # what step 2 trains on was sampled before
            in_time.append(stepping.wait(DEADLINE_S))
        return prepare(version, weights)

    def watched_begin(groups, *, policy_version):
        if policy_version == 1:
            stepping.set()
        return begin(groups, policy_version=policy_version)

    policies.prepare, learner.update.begin = prepare_late, watched_begin
    seen = published_versions(learner)
    await learner.run()
    assert in_time == [True]
    assert seen == [0, 1, 2, 3]


async def test_a_version_is_compared_only_after_the_one_before_was_announced(make_learner):
    learner = make_learner()
    seen = published_versions(learner)
    published, before = learner.published_state, []
    take = published.take

    def watched(precision):
        before.append(list(seen))
        return take(precision)

    published.take = watched
    await learner.run()
    assert before == [[], [0], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize("version", [0, 1, 3])
async def test_a_version_that_cannot_be_published_ends_the_run(make_learner, version):
    learner = make_learner()
    policies = learner.policies
    prepare = policies.prepare

    def broken(policy_version, weights):
        if policy_version == version:
            raise MemoryError("no room for a delta")
        return prepare(policy_version, weights)

    policies.prepare = broken
    with pytest.raises(MemoryError, match="no room for a delta"):
        await learner.run()


LIMIT_BYTES = 22_000
"""More than a version in memory, to which the kernel's limit applies too, or a few records; less
than a checkpoint has."""
MODEL_LIMIT_BYTES = 6_000
"""Less than the model has."""


def messages(tmp_path, kind):
    return [event.message for event in read_events(tmp_path) if event.kind == kind]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


async def test_training_goes_on_without_a_checkpoint_and_the_next_one_tries_again(
    make_learner, tmp_path
):
    learner = make_learner(checkpoint={"everySteps": 1}, steps=9)
    saver, dispatcher = learner.training.saver, learner.dispatcher
    for step, limit_bytes in [(1, LIMIT_BYTES), (2, LIMIT_BYTES), (3, resource.RLIM_INFINITY)]:
        dispatcher.policy_version = step
        with files_of_at_most(limit_bytes):
            await saver.save_if_due()
            await saver.join()
    assert names(tmp_path / "checkpoints") == ["step-00000003"]
    said = messages(tmp_path, "DiskFull")
    assert [f"step-0000000{step}: cannot be written" in said[step - 1] for step in (1, 2)]
    assert len(said) == 2


async def test_without_room_at_the_end_the_run_fails_with_a_sentence_and_leaves_nothing(
    make_learner, tmp_path
):
    learner = make_learner(steps=1, log=MemoryLog())
    with files_of_at_most(LIMIT_BYTES), pytest.raises(StartError) as caught:
        await learner.run()
    assert "step-00000001: cannot be written" in str(caught.value)
    assert "(there is none)" in str(caught.value)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert not (tmp_path / "model").exists()


async def test_a_written_checkpoint_is_resumed_when_the_disk_had_no_room_for_the_model(
    make_learner, tmp_path
):
    learner = make_learner(steps=1)
    write_model = learner.training.saver.export.write_model

    def without_room(folder, tensors, *, step):
        with files_of_at_most(MODEL_LIMIT_BYTES):
            write_model(folder, tensors, step=step)

    learner.training.saver.export.write_model = without_room
    with pytest.raises(StartError, match=r"model: cannot be written.*\(step 1\)"):
        await learner.run()
    assert not (tmp_path / "model").exists()
    later = make_learner(steps=1)
    assert later.training.resume() == 1
    assert await later.run() is RunPhase.COMPLETE
    assert ExportedModel.read(tmp_path / "model").step == 1
