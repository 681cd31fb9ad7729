import json
import shutil

import pytest
import torch

from tests.unit.learner.scenes import make_run
from tests.unit.update.models import llama
from vcpo.spec import continuation_digest
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.checkpoint import Checkpoint, CheckpointError, CheckpointFolder
from vcpo_learner.policy_model import policy_tensors, restore_policy

FILES = ["meta.json", "model.safetensors", "update.pt", "ledger.pb"]


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path, make_run(checkpoint={"keep": 2}))


def checkpoint(step, *, parameters=None):
    return Checkpoint(
        step=step,
        parameters=parameters or {"weight": torch.full((2,), float(step))},
        update_state={"optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}, "steps_taken": 3},
        ledger=ledger_pb2.LedgerSnapshot(consumed=4 * step, next_prompt_index=9),
    )


def names(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir())


def test_there_is_nothing_to_resume_from_at_first(folder):
    assert folder.load_newest() is None


def test_what_is_read_is_what_was_written(folder):
    folder.save(checkpoint(5))
    read = folder.load_newest()
    assert read.step == 5
    assert read.parameters["weight"].tolist() == [5.0, 5.0]
    assert read.update_state == {
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}},
        "steps_taken": 3,
    }
    assert read.ledger == ledger_pb2.LedgerSnapshot(consumed=20, next_prompt_index=9)


def test_the_newest_is_the_one_with_the_most_steps(folder):
    for step in (9, 100):
        folder.save(checkpoint(step))
    assert folder.load_newest().step == 100


def test_only_the_newest_are_kept(folder, tmp_path):
    for step in (1, 2, 3):
        folder.save(checkpoint(step))
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_saving_a_step_again_replaces_it(folder):
    folder.save(checkpoint(1))
    folder.save(checkpoint(1, parameters={"weight": torch.zeros(2)}))
    assert folder.load_newest().parameters["weight"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("written", range(len(FILES) + 1))
def test_a_save_that_was_killed_is_never_read(folder, tmp_path, written):
    folder.save(checkpoint(1))
    whole = folder.save(checkpoint(2))
    killed = tmp_path / f".{whole.name}.partial"
    killed.mkdir()
    for name in FILES[:written]:
        shutil.move(whole / name, killed / name)
    shutil.rmtree(whole)
    assert folder.load_newest().step == 1


def test_what_a_killed_save_left_is_removed_by_the_next(folder, tmp_path):
    (tmp_path / ".step-00000007.partial").mkdir(parents=True)
    folder.save(checkpoint(8))
    assert names(tmp_path) == ["step-00000008"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["empty", "cut", "noise", "gone"])
def test_a_damaged_file_is_named_with_what_to_do(folder, tmp_path, name, damage):
    path = folder.save(checkpoint(3)) / name
    content = path.read_bytes()
    changed = {"empty": b"", "cut": content[: len(content) // 2], "noise": b"\xff" * 64}
    path.unlink()
    if damage != "gone":
        path.write_bytes(changed[damage])
    with pytest.raises(CheckpointError, match=rf"step-00000003/{name}: .*remove .*step-00000003"):
        folder.load_newest()


@pytest.mark.parametrize("document", ["[]", "{}", '{"format": 1, "step": 3}'])
def test_a_description_that_lacks_something_is_damaged(folder, document):
    (folder.save(checkpoint(3)) / "meta.json").write_text(document)
    with pytest.raises(CheckpointError, match=r"meta\.json: cannot be read"):
        folder.load_newest()


def test_a_format_of_another_version_is_refused(folder):
    path = folder.save(checkpoint(3)) / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(CheckpointError, match=r"has format 2.*resume with the version"):
        folder.load_newest()


def test_a_checkpoint_of_another_run_is_refused_with_the_cure(folder, tmp_path):
    folder.save(checkpoint(3))
    other = CheckpointFolder(tmp_path, make_run(model={"name": "larger"}))
    with pytest.raises(CheckpointError, match="resume with the spec in its run directory"):
        other.load_newest()


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 99},
        {"algorithm": {"maxPolicyLagSteps": 5}},
        {"batch": {"promptsPerStep": 2, "trajectoriesPerPrompt": 2, "microBatchTrajectories": 1}},
        {
            "batch": {
                "promptsPerStep": 2,
                "trajectoriesPerPrompt": 2,
                "promptPool": 9,
                "promptSelection": "posterior",
            }
        },
    ],
    ids=["steps", "lag bound", "micro-batch", "prompts"],
)
def test_what_may_change_between_a_run_and_its_continuation(change):
    assert continuation_digest(make_run(**change)) == continuation_digest(make_run())


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"name": "other"}},
        {"environment": {"name": "countdown"}},
        {"batch": {"promptsPerStep": 3, "trajectoriesPerPrompt": 2}},
        {"optimizer": {"learningRate": 1e-3}},
    ],
    ids=["model", "environment", "batch", "optimizer"],
)
def test_what_may_not(change):
    assert continuation_digest(make_run(**change)) != continuation_digest(make_run())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_models_weights_come_back_bit_for_bit(folder, tied):
    torch.manual_seed(0)
    model, other = llama(tied=tied), llama(tied=tied)
    folder.save(checkpoint(1, parameters=policy_tensors(model)))
    restore_policy(other, folder.load_newest().parameters)
    for name, mine in model.state_dict().items():
        assert torch.equal(mine, other.state_dict()[name]), name
