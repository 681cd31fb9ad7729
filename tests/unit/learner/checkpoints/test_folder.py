import json
import shutil
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.learner.checkpoints import trained, weight_of, write_checkpoint
from tests.fixtures.learner.dispatcher import make_run
from vcpo.api import continuation_changes, continuation_document
from vcpo.wire.v1 import ledger_pb2
from vcpo_learner.checkpoints.folder import (
    CheckpointFolder,
    DamagedCheckpointError,
    best_evaluated_step,
    kept_steps,
)
from vcpo_learner.checkpoints.manifest import CheckpointError
from vcpo_learner.checkpoints.tensor_files import read_parameters

FILES = [
    "meta.json",
    "tensors/shard-00001-model-00001-of-00001.safetensors",
    "update.pt",
    "ledger-00000.pb",
    "ledger-00001.pb",
]


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(
        tmp_path, make_run(checkpoint={"keep": 2}, health={"rollBackOn": "never"})
    )


def save(folder, step, *, value=None):
    model = weight_of(step if value is None else value)
    return write_checkpoint(
        folder,
        step,
        model=model,
        optimizer=trained(model),
        update_state={"warning": {"score": torch.tensor(3.0)}, "steps_taken": step},
        ledger=[
            ledger_pb2.LedgerSnapshot(consumed=4 * step, next_prompt_index=9),
            ledger_pb2.LedgerSnapshot(buffered=[ledger_pb2.HeldLease(grant_number=step)]),
        ],
    )


def weight(checkpoint):
    """The parameter in a checkpoint that was read."""
    parameter = torch.empty(2)
    read_parameters(checkpoint.tensors, {"weight": parameter})
    return parameter.tolist()


def names(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir())


def newest(folder):
    """The newest checkpoint of a folder in which nothing is damaged."""
    found, damaged = folder.load_newest()
    assert damaged == ()
    return found


def test_what_is_read_is_what_was_written(folder):
    save(folder, 5)
    read = newest(folder)
    assert read.step == 5
    assert weight(read) == [5.0, 5.0]
    assert read.update_state == {"warning": {"score": torch.tensor(3.0)}, "steps_taken": 5}
    assert [part.consumed for part in read.ledger] == [20, 0]
    assert [group.grant_number for part in read.ledger for group in part.buffered] == [5]


def test_a_good_checkpoint_that_is_old_enough_for_a_rollback_outlives_newer_bad_ones(tmp_path):
    folder = CheckpointFolder(tmp_path, make_run(checkpoint={"keep": 2}))
    for step, healthy in [(10, True), (20, False), (30, False), (40, False)]:
        write_checkpoint(folder, step, model=weight_of(step), healthy=healthy)
    assert folder.steps() == [10, 40]
    assert folder.healthy_steps() == [10]


def test_saving_a_step_again_replaces_it(folder):
    save(folder, 1)
    save(folder, 1, value=0)
    assert weight(newest(folder)) == [0.0, 0.0]


@pytest.mark.parametrize("written", range(len(FILES) + 1))
def test_a_save_that_was_killed_is_never_read(folder, tmp_path, written):
    save(folder, 1)
    whole = save(folder, 2)
    killed = tmp_path / f".{whole.name}.partial"
    killed.mkdir()
    (killed / "tensors").mkdir()
    for name in FILES[:written]:
        shutil.move(whole / name, killed / name)
    shutil.rmtree(whole)
    assert newest(folder).step == 1


def flip_bit(content):
    """The same with one bit of the middle byte flipped."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES = {
    "flipped bit": flip_bit,
    "second half zeroed": lambda content: (
        content[: len(content) // 2] + bytes(len(content) - len(content) // 2)
    ),
    "cut": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"\0",
    "empty": lambda content: b"",
    "noise": lambda content: b"\xff" * len(content),
}


def damage(path, kind):
    if kind == "gone":
        path.unlink()
    elif kind == "of another step":
        shutil.copy(Path(str(path).replace("step-00000002", "step-00000001")), path)
    else:
        path.write_bytes(DAMAGES[kind](path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in FILES for kind in [*DAMAGES, "gone", "of another step"]],
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(folder, name, kind):
    for step in (1, 2):
        path = save(folder, step)
    damage(path / name, kind)
    found, damaged = folder.load_newest()
    assert found.step == 1
    assert weight(found) == [1.0, 1.0]
    assert [one.path for one in damaged] == [path]
    assert name in str(damaged[0]) or (name, kind) == ("meta.json", "of another step")


def test_a_manifest_that_names_a_file_elsewhere_is_damaged(folder, tmp_path):
    (tmp_path / "secret").write_text("x")
    for name in ("../secret", "tensors/../../secret", str(tmp_path / "secret")):
        path = save(folder, 3) / "meta.json"
        document = json.loads(path.read_text())
        document["files"][name] = {"size_bytes": 1, "xxh3": xxhash.xxh3_64_hexdigest(b"x")}
        path.write_text(sign_manifest(document))
        with pytest.raises(CheckpointError, match=r"meta\.json: files\."):
            folder.load_newest()


def test_a_file_without_an_end_is_not_read(folder):
    path = save(folder, 3)
    (path / "update.pt").unlink()
    (path / "update.pt").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"update\.pt: must be a plain file"):
        folder.load_newest()


def test_a_file_that_is_no_part_of_the_checkpoint_is_not_read(folder):
    path = save(folder, 3)
    (path / "notes.txt").write_text("mine")
    assert newest(folder).step == 3


def test_without_a_checkpoint_that_is_whole_each_is_named_with_what_to_do(folder):
    for step in (1, 2):
        damage(save(folder, step) / "update.pt", "gone")
    with pytest.raises(CheckpointError) as caught:
        folder.load_newest()
    message = str(caught.value)
    assert "step-00000001/update.pt" in message
    assert "step-00000002/update.pt" in message
    assert "to start the run again" in message


@pytest.mark.parametrize(
    "stray", ["step-99", "step-000000003", "step-00000099.bak", "my-step-00000099"]
)
def test_a_stray_folder_is_never_taken_for_a_checkpoint(folder, tmp_path, stray):
    save(folder, 3)
    shutil.copytree(tmp_path / "step-00000003", tmp_path / stray)
    assert newest(folder).step == 3
    for step in (4, 5):
        save(folder, step)
    assert stray in names(tmp_path)


def test_a_file_by_the_name_of_a_checkpoint_is_a_damaged_one(folder, tmp_path):
    save(folder, 3)
    (tmp_path / "step-00000004").write_text("")
    found, damaged = folder.load_newest()
    assert found.step == 3
    assert "step-00000004/meta.json" in str(*damaged)


def test_a_copy_under_a_later_steps_name_is_not_what_it_says(folder, tmp_path):
    save(folder, 3)
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000099")
    found, (damaged,) = folder.load_newest()
    assert found.step == 3
    assert "step-00000099" in str(damaged)
    assert "holds step 3" in str(damaged)


def test_what_is_set_aside_makes_no_other_checkpoint_go_and_goes_with_the_next_one(
    folder, tmp_path
):
    for step in (1, 9):
        damage_of = save(folder, step)
    damage(damage_of / "ledger-00000.pb", "flipped bit")
    _, damaged = folder.load_newest()
    folder.set_aside(damaged)
    assert names(tmp_path) == ["damaged-step-00000009", "step-00000001"]
    save(folder, 5)
    assert names(tmp_path) == ["step-00000001", "step-00000005"]


def test_a_step_that_was_not_kept_is_refused_with_those_there_are(folder):
    for step in (1, 2, 3):
        save(folder, step)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 1.*has 2, 3"):
        folder.load(1)


def test_a_step_asked_for_by_number_has_no_stand_in(folder):
    for step in (1, 2):
        path = save(folder, step)
    damage(path / "update.pt", "flipped bit")
    with pytest.raises(DamagedCheckpointError, match=r"step-00000002/update\.pt"):
        folder.load(2)


def sign_manifest(document):
    """A manifest whose own sum is right, whatever it says."""
    rest = {key: value for key, value in document.items() if key != "xxh3"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return json.dumps({**rest, "xxh3": xxhash.xxh3_64_hexdigest(text.encode())})


def test_a_format_of_another_version_is_refused(folder):
    for step in (2, 3):
        path = save(folder, step) / "meta.json"
    path.write_text(sign_manifest({**json.loads(path.read_text()), "format": 8}))
    with pytest.raises(CheckpointError, match=r"has format 8.*resume with the version"):
        folder.load_newest()


def test_a_checkpoint_of_another_run_is_refused_with_the_cure(folder, tmp_path):
    save(folder, 3)
    other = CheckpointFolder(tmp_path, make_run(model={"name": "larger"}))
    with pytest.raises(CheckpointError) as refused:
        other.load_newest()
    assert "(spec.model.name: 'tiny' -> 'larger'); change it back to resume" in str(refused.value)


def changes_to(other):
    """What keeps a run from going on as another one."""
    return list(
        continuation_changes(continuation_document(make_run()), continuation_document(other))
    )


def test_steps_and_prompts_may_change_between_a_run_and_its_continuation():
    batch = {"promptsPerStep": 2, "trajectoriesPerPrompt": 2, "promptPool": 9}
    assert changes_to(make_run(steps=99, batch={**batch, "promptSelection": "teacher"})) == []


@pytest.mark.parametrize(
    ("section", "changed", "said"),
    [
        ("model", {"name": "other"}, "spec.model.name: 'tiny' -> 'other'"),
        (
            "environment",
            {"name": "sort_digits", "parameters": {"digits": 4}},
            "spec.environment.parameters.digits: nothing -> 4",
        ),
        (
            "batch",
            {"promptsPerStep": 3, "trajectoriesPerPrompt": 2},
            "spec.batch.promptsPerStep: 2 -> 3",
        ),
        ("optimizer", {"learningRate": 1e-3}, "spec.optimizer.learningRate: 1e-06 -> 0.001"),
    ],
)
def test_what_may_not_is_named_with_its_old_and_its_new_value(section, changed, said):
    assert changes_to(make_run(**{section: changed})) == [said]


def test_the_best_is_the_most_accurate_that_has_a_checkpoint_and_the_latest_of_equal_ones():
    found = {0: 0.1, 50: 0.9, 100: 0.7, 150: 0.7, 200: 0.5}
    assert best_evaluated_step(found, [50, 100, 150]) == 50
    assert best_evaluated_step(found, [100, 150, 200]) == 150


@pytest.mark.parametrize(
    ("steps", "good", "kept"),
    [
        ([50], [50], {50}),
        ([50, 100, 150], [50, 100, 150], {100, 150}),
        ([50, 100, 150], [50], {50, 150}),  # the last good one takes the place of 100
        ([50, 100, 150], [], {100, 150}),  # without rollbacks, or nothing is good
        ([9, 15, 20], [9, 15, 20], {9, 15, 20}),  # 9 is just old enough, and 15 is the next to be
        ([5, 10, 25, 30], [5, 10, 25, 30], {10, 25, 30}),
    ],
)
def test_of_two_that_are_kept_one_is_old_and_good_enough_for_a_rollback(steps, good, kept):
    assert kept_steps(steps, keep=2, good=good, good_age_steps=11) == kept


@given(
    st.lists(st.booleans(), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(1, 60),
)
def test_however_checkpoints_follow_there_is_one_to_go_back_to_and_never_many(
    healthy, keep, every_steps, good_age_steps
):
    """Saved one by one, each time with what was kept before."""
    on_disk = []
    for number in range(1, len(healthy) + 1):
        step = number * every_steps
        on_disk = sorted({*on_disk, step})
        good = [one for one in on_disk if healthy[one // every_steps - 1]]
        kept = kept_steps(on_disk, keep=keep, good=good, good_age_steps=good_age_steps)
        assert step in kept
        assert len(kept) <= max(keep, 3)
        on_disk = sorted(kept)
        aged = [one for one in on_disk if one in good and one <= step - good_age_steps]
        was_good = [one * every_steps for one, well in enumerate(healthy[:number], 1) if well]
        if any(one <= step - 2 * good_age_steps - 2 * every_steps for one in was_good):
            assert aged
        # With nothing but good ones it is at most twice as old as needed, and two checkpoints.
        if all(healthy) and aged:
            assert max(aged) > step - 2 * good_age_steps - 3 * every_steps
