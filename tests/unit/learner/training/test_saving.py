"""A learner whose disk is full; the kernel sets the limit."""

import resource

import pytest

from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.learner.training import MemoryLog
from vcpo.records.exported_model import ExportedModel, ExportKind
from vcpo.records.journal import read_events
from vcpo.service.lifecycle import StartError
from vcpo.wire.phase import RunPhase

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


def test_what_a_model_folder_is_of_can_be_read_and_a_strange_file_is_nothing(tmp_path):
    exported = ExportedModel(kind=ExportKind.MODEL, run="r", step=7, base_model="m", parameters=9)
    exported.write(tmp_path)
    assert ExportedModel.read(tmp_path) == exported
    (tmp_path / "vcpo.json").write_text('{"step": "many"}')
    assert ExportedModel.read(tmp_path) is None


async def test_the_best_evaluated_checkpoint_outlives_newer_ones(make_learner, tmp_path):
    learner = make_learner(
        checkpoint={"everySteps": 1, "keep": 1},
        evaluation={"everySteps": 100},
        health={"rollBackOn": "never"},
        steps=9,
    )
    saver, dispatcher = learner.training.saver, learner.dispatcher
    for step, accuracy in [(1, 0.25), (2, 0.75), (3, 0.5), (4, 0.5)]:
        dispatcher.policy_version = step
        dispatcher.ledger.record_evaluation(step, accuracy)
        await saver.save()
    assert names(tmp_path / "checkpoints") == ["step-00000002", "step-00000004"]
