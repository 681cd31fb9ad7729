"""Which modules are cut over ranks, and gathered while they compute."""

import pytest
from torch import nn

from vcpo.service.lifecycle import StartError
from vcpo_learner.ranks.sharding import decoder_layers


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
