"""Writing to a disk that is full: the limit on a file's size is the kernel's own."""

import pytest
import torch
from safetensors.torch import save_file

from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.learner.checkpoints import weight_of
from vcpo.api.optimizer import Optimizer
from vcpo_learner.checkpoints.disk import WriteError, atomic_folder
from vcpo_learner.checkpoints.tensor_files import TensorFiles
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer

LIMIT_BYTES = 1 << 14
LARGE = torch.zeros(LIMIT_BYTES)
"""Four times as many bytes as a file may have."""


def write_sharded(path):
    model = weight_of(1.0, len(LARGE))
    TensorFiles(model, PolicyOptimizer(model, Optimizer())).save(path).result()


WRITERS = {
    "tensors": lambda path: save_file({"weight": LARGE}, path),
    "sharded tensors": write_sharded,
    "bytes": lambda path: path.write_bytes(bytes(4 * LIMIT_BYTES)),
}


def write(target, writer):
    with atomic_folder(target) as folder:
        WRITERS[writer](folder / "file")


@pytest.mark.parametrize("writer", WRITERS)
def test_a_failed_write_is_said_in_a_sentence_and_leaves_nothing(tmp_path, writer):
    with files_of_at_most(LIMIT_BYTES), pytest.raises(WriteError) as caught:
        write(tmp_path / "thing", writer)
    assert str(caught.value).startswith(f"{tmp_path / 'thing'}: cannot be written (")
    assert "File too large" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writer", WRITERS)
def test_what_stood_there_stays_when_there_is_no_room_for_its_successor(tmp_path, writer):
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "file").write_text("before")
    with files_of_at_most(LIMIT_BYTES), pytest.raises(WriteError):
        write(tmp_path / "thing", writer)
    assert (tmp_path / "thing" / "file").read_text() == "before"
    write(tmp_path / "thing", writer)
    sizes = [path.stat().st_size for path in (tmp_path / "thing").rglob("*")]
    assert max(sizes) >= 4 * LIMIT_BYTES
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_another_error_stays_what_it_is_and_leaves_nothing(tmp_path, error):
    def fail():
        with atomic_folder(tmp_path / "thing") as folder:
            (folder / "half").touch()
            raise error

    with pytest.raises(type(error)) as caught:
        fail()
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_no_hindrance(tmp_path):
    (tmp_path / ".thing.partial").mkdir()
    (tmp_path / ".thing.partial" / "stale").touch()
    write(tmp_path / "thing", "bytes")
    assert [path.name for path in (tmp_path / "thing").iterdir()] == ["file"]
