"""A learner whose disk is full for a while, or for good; the kernel sets the limit."""

import resource

import pytest

from tests.fixtures.disk_limits import files_of_at_most, limit_file_size
from tests.fixtures.learner.training import MemoryLog, TrainingFixture
from vcpo.records.exported_model import ExportedModel, ExportKind
from vcpo.records.journal import read_events, read_metrics
from vcpo.service.lifecycle import StartError
from vcpo.wire.phase import RunPhase
from vcpo_learner.checkpoints.disk import DiskFullError
from vcpo_learner.training.saving import RETRY_S

LIMIT_BYTES = 22_000
"""More than a version in memory, to which the kernel's limit applies too, or a few records; less
than a checkpoint has."""
MODEL_LIMIT_BYTES = 6_000
"""Less than the model has."""
CHECKPOINTS = {"everySteps": 1, "keep": 9, "fullDiskWaitSeconds": 40}


@pytest.fixture
def make_learner(tmp_path):
    def make(sleep=None, **sections):
        async def advance_clock(seconds):
            learner.clock.advance(seconds)
            if sleep is not None:
                sleep()

        learner = TrainingFixture(
            tmp_path,
            sleep=advance_clock,
            log=MemoryLog(),
            **{"checkpoint": CHECKPOINTS, **sections},
        )
        return learner

    return make


def messages(tmp_path, kind):
    return [event.message for event in read_events(tmp_path) if event.kind == kind]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


async def test_training_goes_on_on_a_full_disk_and_all_is_saved_when_there_is_room(
    make_learner, tmp_path
):
    waits = []

    def room_at_the_third_time():
        waits.append(None)
        if len(waits) == 3:
            limit_file_size(resource.RLIM_INFINITY)

    learner = make_learner(room_at_the_third_time, steps=6)
    with files_of_at_most(LIMIT_BYTES):
        assert await learner.run() is RunPhase.COMPLETE
    assert len(waits) == 3
    (full,) = messages(tmp_path, "DiskFull")
    assert f"{tmp_path / 'checkpoints'}: no room for the checkpoint of step 1: " in full
    assert len(messages(tmp_path, "DiskHasRoom")) == 1
    assert names(tmp_path / "checkpoints") == ["step-00000006"]
    assert ExportedModel.read(tmp_path / "model").step == 6
    # Records that found no room were written when there was.
    assert [step.step for step in read_metrics(tmp_path).steps] == [1, 2, 3, 4, 5, 6]
    assert (
        learner.gauges._metrics.registry.get_sample_value(
            "vcpo_learner_disk_full_total", {"run": "run"}
        )
        == len(waits) + 1
    )


async def test_without_room_the_run_ends_with_a_sentence_and_leaves_nothing_half_written(
    make_learner, tmp_path
):
    learner = make_learner(steps=1)
    with files_of_at_most(LIMIT_BYTES), pytest.raises(StartError) as caught:
        await learner.run()
    message = str(caught.value)
    assert "no room for the checkpoint of step 1: " in message
    assert "are needed and" in message
    assert "gave up after 40 s at step 1." in message
    assert "(there is none)" in message
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert not (tmp_path / "model").exists()


async def test_a_written_checkpoint_is_resumed_when_the_disk_had_no_room_for_the_model(
    make_learner, tmp_path
):
    learner = make_learner(steps=1)
    write_model = learner.training._saver._export.write_model

    def without_room(folder, tensors, *, step):
        with files_of_at_most(MODEL_LIMIT_BYTES):
            write_model(folder, tensors, step=step)

    learner.training._saver._export.write_model = without_room
    with pytest.raises(StartError, match=r"no room for the model.*\(step 1\)"):
        await learner.run()
    assert not (tmp_path / "model").exists()
    later = make_learner(steps=1)
    assert later.training.resume() == 1
    assert await later.run() is RunPhase.COMPLETE
    assert ExportedModel.read(tmp_path / "model").step == 1


async def test_a_run_that_is_asked_to_stop_waits_no_longer_than_its_drain(make_learner):
    learner = make_learner(steps=9)
    with files_of_at_most(LIMIT_BYTES), pytest.raises(StartError, match="gave up after 0 s"):
        await learner.run(until_step=1)


async def test_a_checkpoint_that_is_due_is_tried_again_after_the_retry_period(
    make_learner, tmp_path
):
    learner = make_learner(checkpoint={"everySteps": 1}, steps=9)
    saving, dispatcher = learner.training._saver, learner.dispatcher
    dispatcher.resume_at(1)
    with files_of_at_most(LIMIT_BYTES):
        await saving.save_if_due()
        with pytest.raises(DiskFullError):
            await saving.join()
    dispatcher.resume_at(2)
    await saving.save_if_due()
    assert not names(tmp_path / "checkpoints")
    learner.clock.advance(RETRY_S)
    await saving.save_if_due()
    await saving.join()
    assert names(tmp_path / "checkpoints") == ["step-00000002"]


def test_what_a_model_folder_is_of_can_be_read_and_a_strange_file_is_nothing(tmp_path):
    exported = ExportedModel(kind=ExportKind.MODEL, run="r", step=7, base_model="m", parameters=9)
    exported.write(tmp_path)
    assert ExportedModel.read(tmp_path) == exported
    (tmp_path / "vcpo.json").write_text('{"step": "many"}')
    assert ExportedModel.read(tmp_path) is None


def shown_space(monkeypatch, free_bytes):
    usage = type("Usage", (), {"free": free_bytes})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)


async def test_a_run_whose_checkpoints_will_not_fit_says_so_at_the_start(
    make_learner, tmp_path, monkeypatch
):
    learner = make_learner(steps=1)
    trained = sum(each.numel() for each in learner.model.parameters())
    shown_space(monkeypatch, 12 * trained)
    assert await learner.run() is RunPhase.COMPLETE
    (low,) = messages(tmp_path, "DiskSpaceLow")
    assert "missing for 11 checkpoints" in low


async def test_a_run_without_room_for_one_checkpoint_does_not_start(
    make_learner, tmp_path, monkeypatch
):
    learner = make_learner(steps=1)
    trained = sum(each.numel() for each in learner.model.parameters())
    shown_space(monkeypatch, 12 * trained - 1)
    with pytest.raises(StartError, match=r"no room for a checkpoint: .* are missing"):
        await learner.run()


async def test_the_best_evaluated_checkpoint_outlives_newer_ones(make_learner, tmp_path):
    learner = make_learner(
        checkpoint={"everySteps": 1, "keep": 1},
        evaluation={"everySteps": 100},
        health={"rollBackOn": "never"},
        steps=9,
    )
    saver, dispatcher = learner.training._saver, learner.dispatcher
    for step, accuracy in [(1, 0.25), (2, 0.75), (3, 0.5), (4, 0.5)]:
        dispatcher.resume_at(step)
        dispatcher.ledger.record_evaluation(step, accuracy)
        await saver.save()
    assert names(tmp_path / "checkpoints") == ["step-00000002", "step-00000004"]
