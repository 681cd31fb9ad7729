"""Log lines of vLLM's reload: they name missing parameters and no buffers."""

import logging

import pytest
from torch import nn, zeros

from vcpo_rollout.engines.vllm.worker import ReloadWarningFilter


class Angles(nn.Module):
    """Has a buffer alone, as rotary embeddings have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cosines", zeros(4))


def make_warning(layer):
    return logging.makeLogRecord(
        {"msg": "%s: Failed to load weights", "args": (layer,), "levelno": logging.WARNING}
    )


@pytest.mark.parametrize(("layer", "is_written"), [("Angles", False), ("Linear", True)])
def test_only_a_layer_with_parameters_can_lack_weights(layer, is_written):
    kept = ReloadWarningFilter(nn.Sequential(Angles(), nn.Linear(2, 2)))
    assert kept.filter(make_warning(layer)) is is_written


def test_other_lines_of_the_reload_are_kept():
    kept = ReloadWarningFilter(Angles())
    assert kept.filter(logging.makeLogRecord({"msg": "loading", "levelno": logging.WARNING}))
