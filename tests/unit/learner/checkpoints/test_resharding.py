"""Checkpoints of several ranks: another number of ranks goes on with the same numbers."""

import errno

import torch
from torch.distributed.tensor import distribute_tensor

from tests.fixtures.disk_limits import limit_file_size
from tests.fixtures.learner.checkpoints import assert_equal, numbers, trained_model
from tests.fixtures.learner.models import llama
from tests.fixtures.learner.ranks import run_ranks
from vcpo.api.learner import Optimizer
from vcpo.api.workloads import Precision
from vcpo_learner.checkpoints.tensor_files import TensorFiles, parameter_shapes, read_parameters
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer
from vcpo_learner.ranks.sharding import place_model


def placed(ranks, seed):
    """A model on the ranks, its optimizer, and the files of both."""
    torch.manual_seed(seed)
    model = llama()
    place_model(model, ranks, Precision.FLOAT32)
    optimizer = PolicyOptimizer(model, Optimizer())
    return model, optimizer, TensorFiles(model, optimizer, ranks.checkpoint_group)


def take_step(model, optimizer):
    """A step on a gradient that depends on nothing but the whole shape."""
    torch.manual_seed(5)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape)
        parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    optimizer.step(0.01)
    optimizer.zero_grad()


def test_four_ranks_and_one_go_on_with_what_two_wrote(tmp_path):
    def two(ranks):
        model, optimizer, files = placed(ranks, seed=0)
        take_step(model, optimizer)
        checksums = files.save(tmp_path / "two").result()
        files.close()
        return checksums, numbers(model, optimizer)

    def four_in_two_copies(ranks):
        model, optimizer, files = placed(ranks, seed=9)
        files.load(tmp_path / "two")
        found = numbers(model, optimizer)
        files.save(tmp_path / "four").result()
        files.close()
        return found

    (checksums, expected), (others_checksums, _) = run_ranks(2, two)
    assert sorted(checksums) == [
        f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2)
    ]
    assert not others_checksums
    for found in run_ranks(4, four_in_two_copies, fsdp_size=2):
        assert_equal(found, expected)
    model, optimizer = trained_model(seed=3, steps=0)
    TensorFiles(model, optimizer).load(tmp_path / "four")
    assert_equal(numbers(model, optimizer), expected)
    # A replica's copy is written once.
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).glob("*.safetensors"))
        for name in ("two", "four")
    ]
    assert sizes[1] < 1.5 * sizes[0]


def test_one_process_reads_the_parameters_of_two_ranks_and_two_ranks_those_of_one(tmp_path):
    model, optimizer = trained_model()
    TensorFiles(model, optimizer).save(tmp_path / "one").result()
    expected = numbers(model, optimizer)

    def two(ranks):
        model, optimizer, files = placed(ranks, seed=9)
        files.load(tmp_path / "one")
        found = numbers(model, optimizer)
        files.save(tmp_path / "two").result()
        files.close()
        return found

    for found in run_ranks(2, two):
        assert_equal(found, expected)
    whole = {name: torch.empty(shape) for name, shape in parameter_shapes(tmp_path / "two").items()}
    read_parameters(tmp_path / "two", whole)
    assert_equal(whole, {name: expected[name] for name in whole})


def test_the_leader_learns_why_another_rank_could_not_write(tmp_path):
    def full_on_the_second(ranks):
        _, _, files = placed(ranks, seed=0)
        if not ranks.is_leader:
            limit_file_size(2_000)
        try:
            files.save(tmp_path / "full").result()
        except OSError as error:
            return error.errno, error.__notes__
        finally:
            files.close()

    assert run_ranks(2, full_on_the_second) == [(errno.EFBIG, ["on rank 1"])] * 2
