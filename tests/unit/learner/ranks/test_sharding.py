"""Which modules are cut over ranks, and gathered while they compute."""

import pytest
from torch import nn

from tests.fixtures.learner.norms import LargestTensor
from tests.fixtures.learner.ranks import run_ranks
from vcpo.api.learner import Optimizer
from vcpo.api.workloads import Precision
from vcpo.service.lifecycle import StartError
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer
from vcpo_learner.per_sample_gradients.slots import Slots
from vcpo_learner.ranks.sharded_sums import ShardedGradient
from vcpo_learner.ranks.sharding import decoder_layers, local_part, place_model


class Mixer(nn.Linear):
    """Within a block, and named as a layer too, as Mamba's."""


class Block(nn.Module):
    def __init__(self, mixer=None):
        super().__init__()
        self.mixer = mixer or Mixer(2, 2)


class Model(nn.Module):
    _no_split_modules = ("Block", "Mixer")

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


def test_a_layer_within_another_one_is_gathered_with_it():
    model = Model(Block(), Block())
    assert decoder_layers(nn.Sequential(model)) == list(model.blocks)


def test_layers_that_share_parameters_are_refused_with_the_cure():
    shared = Mixer(2, 2)
    message = "spec.learner: several ranks, but decoder layers of Model share parameters"
    with pytest.raises(StartError, match=message):
        decoder_layers(Model(Block(shared), Block(shared)))


def test_a_model_that_names_no_layers_is_refused_with_the_cure():
    with pytest.raises(StartError, match=r"Linear does not name its decoder layers .* one rank"):
        decoder_layers(nn.Linear(1, 1))


def exchanged(ranks):
    """Own rows of the sums 1 + rank and 10 (1 + rank) of a matrix of 5 rows; largest new tensor."""
    model = nn.Module()
    model.layer = nn.Linear(3, 5, bias=False)
    model._no_split_modules = ["Linear"]
    place_model(model, ranks, Precision.FLOAT32)
    with pytest.raises(StartError, match="'muon' works with one rank only; use adamw"):
        PolicyOptimizer(model, Optimizer(name="muon"))
    slots = Slots(model)
    (slot,) = slots
    sums = ShardedGradient(slots, ranks.communication).sums(1)
    sums.weighted_sums([slot])[0].add_(1.0 + ranks.rank)
    sums.by_groups([slot])[0].add_(10.0 * (1.0 + ranks.rank))
    with LargestTensor() as largest:
        sums.close(slot)
    sums.complete([2.0])
    return local_part(model.layer.weight.grad), largest.numel


def test_sums_of_a_matrix_are_exchanged_without_a_copy_of_them():
    parts = run_ranks(2, exchanged)
    # 1 + 2 weighted by offsets, and twice 10 + 20 of the group; of 5 rows, 3 and 2.
    assert [part.tolist() for part, _ in parts] == [[[63.0] * 3] * 3, [[63.0] * 3] * 2]
    # Two sums of 6 rows, one of padding, are read where they are; half of them is a rank's own.
    assert [numel for _, numel in parts] == [2 * 6 * 3 // 2] * 2
