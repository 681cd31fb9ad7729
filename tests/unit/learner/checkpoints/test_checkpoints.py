"""Writing to a disk that is full: the limit on a file's size is the kernel's own."""

import pytest
import torch
from safetensors.torch import save_file

from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.learner.checkpoints import assert_equal, numbers, trained_model, weight_of
from tests.fixtures.learner.models import llama, with_buffers
from vcpo.api.learner import Optimizer, OptimizerName
from vcpo_learner.checkpoints import tensor_files
from vcpo_learner.checkpoints.manifest import DamageError, WriteError, atomic_folder
from vcpo_learner.checkpoints.tensor_files import TensorFiles, parameter_shapes, read_buffers
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer
from vcpo_learner.policy_state import persistent_buffers

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


@pytest.mark.parametrize("algorithm", OptimizerName)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_is_read_is_what_was_written_bit_for_bit(tmp_path, tied, algorithm):
    model, optimizer = trained_model(tied=tied, algorithm=algorithm)
    TensorFiles(model, optimizer).save(tmp_path).result()
    other, others = trained_model(seed=1, tied=tied, steps=0, algorithm=algorithm)
    TensorFiles(other, others).load(tmp_path)
    assert_equal(numbers(other, others), numbers(model, optimizer))


def test_persistent_buffers_are_read_as_they_were_written_each_in_its_type(tmp_path):
    model, other = with_buffers(llama()), with_buffers(llama())
    for name in ("bias", "table", "is_set", "angles"):
        getattr(other.model.layers[1], name).fill_(0)
    TensorFiles(model, PolicyOptimizer(model, Optimizer())).save(tmp_path).result()
    TensorFiles(other, PolicyOptimizer(other, Optimizer())).load(tmp_path)
    expected = persistent_buffers(model)
    assert len(expected) == 3
    for found in (persistent_buffers(other), read_buffers(tmp_path)):
        assert_equal(found, expected)
        assert all(found[name].dtype is each.dtype for name, each in expected.items())
    assert not other.model.layers[1].angles.any()


def test_an_optimizer_goes_back_to_before_its_first_step(tmp_path):
    model, optimizer = trained_model(steps=0)
    TensorFiles(model, optimizer).save(tmp_path).result()
    other, others = trained_model(seed=1, steps=3)
    TensorFiles(other, others).load(tmp_path)
    assert not others.moments()
    assert_equal(numbers(other, others), numbers(model, optimizer))


def test_a_parameter_that_never_had_a_gradient_has_no_moments_and_gets_none(tmp_path):
    model, other = llama(), llama()
    for each in (model, other):
        each.unused = torch.nn.Linear(3, 2)
    optimizer, others = (PolicyOptimizer(each, Optimizer()) for each in (model, other))
    for name, parameter in model.named_parameters():
        parameter.grad = None if name.startswith("unused.") else torch.ones_like(parameter)
    optimizer.step(0.01)
    TensorFiles(model, optimizer).save(tmp_path).result()
    TensorFiles(other, others).load(tmp_path)
    assert "unused.weight" not in others.moments()
    assert_equal(numbers(other, others), numbers(model, optimizer))


def test_what_is_written_is_of_the_moment_of_the_call(tmp_path):
    model, optimizer = trained_model()
    files = TensorFiles(model, optimizer)
    expected = numbers(model, optimizer)
    for folder in (tmp_path / "first", tmp_path / "second"):  # the second uses the first's memory
        writing = files.save(folder)
        for parameter in model.parameters():
            parameter.data.fill_(7.0)
        for moments in optimizer.moments().values():
            moments["exp_avg"].fill_(7.0)
        writing.result()
    other, others = trained_model(seed=1, steps=0)
    TensorFiles(other, others).load(tmp_path / "first")
    assert_equal(numbers(other, others), expected)
    TensorFiles(other, others).load(tmp_path / "second")
    assert_equal(numbers(other, others), numbers(model, optimizer))


def test_a_large_state_is_written_into_several_files_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "_FILE_BYTES", 2_000)
    model, optimizer = trained_model()
    checksums = TensorFiles(model, optimizer).save(tmp_path).result()
    assert len(checksums) == len([*tmp_path.iterdir()]) > 1
    other, others = trained_model(seed=1, steps=0)
    TensorFiles(other, others).load(tmp_path)
    assert_equal(numbers(other, others), numbers(model, optimizer))


def test_a_file_that_is_no_safetensors_is_damaged(tmp_path):
    TensorFiles(*trained_model()).save(tmp_path).result()
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(DamageError, match=r"a tensor cannot be read \(SafetensorError"):
        parameter_shapes(tmp_path)


def test_frozen_parameters_are_not_written(tmp_path):
    model, _ = trained_model()
    model.lm_head.requires_grad_(False)
    TensorFiles(model, PolicyOptimizer(model, Optimizer())).save(tmp_path).result()
    trained = {name: each.shape for name, each in model.named_parameters() if each.requires_grad}
    assert parameter_shapes(tmp_path) == trained
    assert "lm_head.weight" not in trained


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "more", torch.nn.Parameter(torch.zeros(1))),
        lambda model: delattr(model, "lm_head"),
        lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(torch.zeros(2, 2))),
    ],
    ids=["more", "fewer", "other size"],
)
def test_tensors_of_another_model_are_refused(tmp_path, change):
    TensorFiles(*trained_model()).save(tmp_path).result()
    other = llama()
    change(other)
    files = TensorFiles(other, PolicyOptimizer(other, Optimizer()))
    with pytest.raises(ValueError, match=r"tensor \S+: does not fit the model"):
        files.load(tmp_path)
