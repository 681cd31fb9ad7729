"""The state from which a restarted learner resumes."""

import shutil

import pytest

from tests.fixtures.records import step_record
from vcpo.learner_control import run_signals
from vcpo.records.journal import METRICS_FILE, Journal, read_events, read_metrics
from vcpo.wire.phase import RunPhase
from vcpo_learner.checkpoints.manifest import CheckpointError


async def test_a_drained_run_saves_and_a_resumed_one_goes_on_from_there(make_learner, tmp_path):
    assert await make_learner().run(until_step=1) is RunPhase.DRAINING
    later = make_learner()
    assert later.training.resume() == 1
    assert later.dispatcher.ledger.counts().consumed == 4
    assert await later.run() is RunPhase.COMPLETE
    assert later.update.steps == [1, 2]
    assert [step.step for step in read_metrics(tmp_path).steps] == [1, 2, 3]


async def test_a_run_that_never_updated_says_so_however_often_it_was_resumed(make_learner):
    for until_step in (1, None):
        learner = make_learner()
        learner.update.refused = {0, 1, 2}
        learner.training.resume()
        await learner.run(until_step=until_step)
    assert run_signals(learner.signals.message()).has_never_updated(3)
    later = make_learner()  # with no step left to take
    later.training.resume()
    await later.training.run(drain_s=0)
    assert run_signals(later.signals.message()).has_never_updated(3)


async def test_a_step_that_a_resume_takes_again_is_not_counted_twice(make_learner, tmp_path):
    await make_learner().run(until_step=1)
    Journal(tmp_path).step(step_record(step=2, skipped="low_ess"))  # after the checkpoint
    later = make_learner()
    assert later.training.resume() == 1
    assert later.signals.last_step.skipped_steps == 0


async def test_a_fresh_run_directory_has_nothing_to_resume(make_learner):
    assert make_learner().training.resume() == 0


async def test_a_run_does_not_start_beside_the_checkpoints_of_another(make_learner):
    make_learner().training.require_unused()
    await make_learner().run(until_step=1)
    with pytest.raises(CheckpointError, match=r"holds a checkpoint of step 1; add --resume"):
        make_learner().training.require_unused()


async def test_a_learner_that_starts_after_the_end_is_complete_at_once_and_asks_nobody(
    make_learner, tmp_path
):
    await make_learner().run()
    records = (tmp_path / "metrics.jsonl").read_bytes()
    later = make_learner()
    later.training.resume()
    assert await later.training.run(drain_s=0) is RunPhase.COMPLETE
    assert (tmp_path / "metrics.jsonl").read_bytes() == records
    assert read_events(tmp_path)[-1].message == "3 steps; complete before this start"


async def test_a_run_whose_model_is_missing_writes_it(make_learner, tmp_path):
    await make_learner().run()
    shutil.rmtree(tmp_path / "model")
    later = make_learner()
    later.training.resume()
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
    assert later.training.resume() == 1
    (told,) = [event for event in read_events(tmp_path) if event.kind == "CheckpointDamaged"]
    assert str(parameters) in told.message
    assert "resuming from step 1" in told.message
    counts = later.dispatcher.ledger.counts()
    assert (counts.consumed, counts.buffered) == (
        4,
        4,
    )  # the log has the step after it
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
        learner.training.resume()
    with pytest.raises(CheckpointError, match=r"holds a checkpoint of step 2; add --resume"):
        learner.training.require_unused()


async def test_checkpoints_that_are_a_dangling_link_are_no_empty_folder(make_learner, tmp_path):
    dangling_link(tmp_path / "checkpoints")
    learner = make_learner()
    for begin in (learner.training.resume, learner.training.require_unused):
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
    later.training.resume()
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
    later.training.resume()
    await later.run()
    assert saved_steps(tmp_path) == [2, 4]
