"""The state from which a restarted learner resumes."""

import resource
import shutil
import threading

import pytest

from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.learner.dispatcher import work_request
from tests.fixtures.learner.training import MemoryLog
from tests.fixtures.records import step_record
from vcpo.learner_control import run_signals
from vcpo.records.exported_model import ExportedModel
from vcpo.records.journal import METRICS_FILE, Journal, read_events, read_metrics
from vcpo.service.lifecycle import StartError
from vcpo.wire.phase import RunPhase
from vcpo_learner.checkpoints.manifest import CheckpointError


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
        seen.append(prepared.policy_version)

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
    make_learner, tmp_path, monkeypatch
):
    learner = make_learner(steps=1)
    export = learner.training.saver.export
    write_model = export.write_model

    def without_room(_, folder, tensors, *, step):
        with files_of_at_most(MODEL_LIMIT_BYTES):
            write_model(folder, tensors, step=step)

    with monkeypatch.context() as full:
        full.setattr(type(export), "write_model", without_room)
        with pytest.raises(StartError, match=r"model: cannot be written.*\(step 1\)"):
            await learner.run()
    assert not (tmp_path / "model").exists()
    later = make_learner(steps=1)
    assert later.training.recovery.resume() == 1
    assert await later.run() is RunPhase.COMPLETE
    assert ExportedModel.read(tmp_path / "model").step == 1


async def test_a_drained_run_saves_and_a_resumed_one_goes_on_from_there(make_learner, tmp_path):
    assert await make_learner().run(until_step=1) is RunPhase.DRAINING
    later = make_learner()
    assert later.training.recovery.resume() == 1
    assert later.dispatcher.ledger.counts().consumed == 4
    assert await later.run() is RunPhase.COMPLETE
    assert later.update.steps == [1, 2]
    assert [step.step for step in read_metrics(tmp_path).steps] == [1, 2, 3]


async def test_a_run_that_never_updated_says_so_however_often_it_was_resumed(make_learner):
    for until_step in (1, None):
        learner = make_learner()
        learner.update.refused = {0, 1, 2}
        learner.training.recovery.resume()
        await learner.run(until_step=until_step)
    assert run_signals(learner.signals.message()).has_never_updated(3)
    later = make_learner()  # with no step left to take
    later.training.recovery.resume()
    await later.training.run(drain_s=0)
    assert run_signals(later.signals.message()).has_never_updated(3)


async def test_a_step_that_a_resume_takes_again_is_not_counted_twice(make_learner, tmp_path):
    await make_learner().run(until_step=1)
    Journal(tmp_path).step(step_record(step=2, skipped="low_ess"))  # after the checkpoint
    later = make_learner()
    assert later.training.recovery.resume() == 1
    assert later.signals.last_step.skipped_steps == 0


async def test_a_fresh_run_directory_has_nothing_to_resume(make_learner):
    assert make_learner().training.recovery.resume() == 0


async def test_a_run_does_not_start_beside_the_checkpoints_of_another(make_learner):
    make_learner().training.recovery.require_unused()
    await make_learner().run(until_step=1)
    with pytest.raises(CheckpointError, match=r"holds a checkpoint of step 1; add --resume"):
        make_learner().training.recovery.require_unused()


async def test_a_learner_that_starts_after_the_end_is_complete_at_once_and_asks_nobody(
    make_learner, tmp_path
):
    await make_learner().run()
    records = (tmp_path / "metrics.jsonl").read_bytes()
    later = make_learner()
    later.training.recovery.resume()
    assert await later.training.run(drain_s=0) is RunPhase.COMPLETE
    assert (tmp_path / "metrics.jsonl").read_bytes() == records
    assert read_events(tmp_path)[-1].message == "3 steps; complete before this start"


async def test_a_run_whose_model_is_missing_writes_it(make_learner, tmp_path):
    await make_learner().run()
    shutil.rmtree(tmp_path / "model")
    later = make_learner()
    later.training.recovery.resume()
    assert await later.run() is RunPhase.COMPLETE
    assert (tmp_path / "model" / "model.safetensors").exists()


async def test_a_damaged_checkpoint_is_reported_and_set_aside_and_the_one_before_is_resumed(
    make_learner, tmp_path
):
    await make_learner(checkpoint={"everySteps": 1}).run(until_step=2)
    (parameters,) = (tmp_path / "checkpoints" / "step-00000002" / "tensors").iterdir()
    content = bytearray(parameters.read_bytes())
    content[len(content) // 2] ^= 4
    parameters.write_bytes(content)
    later = make_learner()
    assert later.training.recovery.resume() == 1
    (told,) = [event for event in read_events(tmp_path) if event.kind == "CheckpointDamaged"]
    assert str(parameters) in told.message
    assert "resuming from step 1" in told.message
    counts = later.dispatcher.ledger.counts()
    assert (counts.consumed, counts.buffered) == (4, 4)  # the log has the step after it
    assert await later.run() is RunPhase.COMPLETE
    assert later.update.steps == [1, 2]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000003"]


def dangling_link(path):
    path.symlink_to(path.with_name("elsewhere"))


async def test_a_run_whose_only_checkpoint_is_a_dangling_link_is_not_begun_again(
    make_learner, tmp_path
):
    path = tmp_path / "checkpoints" / "step-00000002"
    path.parent.mkdir()
    dangling_link(path)
    learner = make_learner()
    with pytest.raises(CheckpointError, match=r"no checkpoint is intact.*step-00000002"):
        learner.training.recovery.resume()
    with pytest.raises(CheckpointError, match=r"holds a checkpoint of step 2; add --resume"):
        learner.training.recovery.require_unused()


async def test_checkpoints_that_are_a_dangling_link_are_no_empty_folder(make_learner, tmp_path):
    dangling_link(tmp_path / "checkpoints")
    learner = make_learner()
    for begin in (learner.training.recovery.resume, learner.training.recovery.require_unused):
        with pytest.raises(FileNotFoundError):
            begin()


@pytest.mark.parametrize("has_journal", [True, False])
async def test_a_throttled_run_resumes_throttled_also_without_its_host_and_its_journal(
    make_learner, tmp_path, has_journal
):
    learner = make_learner()
    learner.dispatcher.throttle(0)
    await learner.run(until_step=1)
    if not has_journal:
        (tmp_path / METRICS_FILE).unlink()
    later = make_learner()
    later.training.recovery.resume()
    assert later.dispatcher.lag_limit_steps == 0


BEST_OF_TWO = {
    "checkpoint": {"everySteps": 1, "keep": 1},
    "evaluation": {"everySteps": 100},
    "health": {"rollBackOn": "never"},
    "steps": 4,
}


def with_accuracies(learner, accuracies):
    """Let evaluations give these results, by step, before the step's checkpoint is written."""
    record_step = learner.signals.record_step

    def record(step):
        record_step(step)
        learner.dispatcher.ledger.record_evaluation(step.step, accuracies[step.step])

    learner.signals.record_step = record
    return learner


def saved_steps(tmp_path):
    return sorted(int(path.name[-8:]) for path in (tmp_path / "checkpoints").glob("step-*"))


async def test_the_best_evaluated_checkpoint_stays_also_after_a_restart_without_a_journal(
    make_learner, tmp_path
):
    accuracies = {1: 2.0, 2: 9.0, 3: 5.0, 4: 5.0}  # above that of the round at the end
    await with_accuracies(make_learner(**BEST_OF_TWO), accuracies).run(until_step=2)
    (tmp_path / METRICS_FILE).unlink()
    later = with_accuracies(make_learner(**BEST_OF_TWO), accuracies)
    later.training.recovery.resume()
    await later.run()
    assert saved_steps(tmp_path) == [2, 4]
