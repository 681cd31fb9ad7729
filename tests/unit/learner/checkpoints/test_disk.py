"""Writing to a disk that is full: the limit on a file's size is the kernel's own."""

import errno

import pytest
import torch

from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.learner.checkpoints import weight_of
from vcpo.api.optimizer import Optimizer
from vcpo_learner.checkpoints.disk import (
    DiskFullError,
    atomic_folder,
    write_tensors,
)
from vcpo_learner.checkpoints.tensor_files import TensorFiles
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer

LIMIT_BYTES = 1 << 14
LARGE = torch.zeros(LIMIT_BYTES)
"""Four times as many bytes as a file may have."""


def write_sharded(path):
    model = weight_of(1.0, len(LARGE))
    TensorFiles(model, PolicyOptimizer(model, Optimizer())).save(path).result()


WRITERS = {
    "tensors": lambda path: write_tensors({"weight": LARGE}, path),
    "sharded tensors": write_sharded,
    "bytes": lambda path: path.write_bytes(bytes(4 * LIMIT_BYTES)),
}


def write(target, writer):
    with atomic_folder(target, what="the thing", needed_bytes=4 * LIMIT_BYTES) as folder:
        WRITERS[writer](folder / "file")


@pytest.mark.parametrize("writer", WRITERS)
def test_no_room_is_said_in_a_sentence_and_leaves_nothing(tmp_path, writer):
    with files_of_at_most(LIMIT_BYTES), pytest.raises(DiskFullError) as caught:
        write(tmp_path / "thing", writer)
    assert caught.value.errno == errno.EFBIG
    assert str(caught.value).startswith(
        f"{tmp_path}: no room for the thing: 0.1 MiB are needed and "
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writer", WRITERS)
def test_what_stood_there_stays_when_there_is_no_room_for_its_successor(tmp_path, writer):
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "file").write_text("before")
    with files_of_at_most(LIMIT_BYTES), pytest.raises(DiskFullError):
        write(tmp_path / "thing", writer)
    assert (tmp_path / "thing" / "file").read_text() == "before"
    write(tmp_path / "thing", writer)
    sizes = [path.stat().st_size for path in (tmp_path / "thing").rglob("*")]
    assert max(sizes) >= 4 * LIMIT_BYTES
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_how_much_is_missing_is_said_when_the_disk_is_smaller(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 3 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with (
        pytest.raises(DiskFullError, match=r"10\.0 MiB are needed and 3\.0 MiB are free, 7\.0 MiB"),
        atomic_folder(tmp_path / "thing", what="it", needed_bytes=10 << 20),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_has_become_read_only_is_no_room_either(tmp_path):
    with (
        pytest.raises(DiskFullError, match=r"no room for it: .*\(Read-only file system\)"),
        atomic_folder(tmp_path / "thing", what="it", needed_bytes=1),
    ):
        raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize(
    "error", [OSError(errno.EACCES, "no"), ValueError("a bug"), KeyboardInterrupt()]
)
def test_another_error_stays_what_it_is_and_leaves_nothing(tmp_path, error):
    def fail():
        with atomic_folder(tmp_path / "thing", what="it", needed_bytes=1) as folder:
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
