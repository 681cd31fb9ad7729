"""Log lines of vLLM: they have our form, and those of its reload name no buffers."""

import json
import logging

import pytest
from torch import nn, zeros
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging, init_logger

from vcpo_rollout.engines.factory import _VLLM_LOGGING
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


@pytest.fixture
def loggers():
    """The state of the loggers that vLLM's configuration changes, restored afterwards."""
    root, vllm = logging.getLogger(), logging.getLogger("vllm")
    handlers, levels = root.handlers[:], (root.level, vllm.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    vllm.setLevel(levels[1])


def test_vllm_writes_lines_with_the_fields_of_its_worker(monkeypatch, capfd, loggers):
    monkeypatch.setenv("VCPO_LOG_FORMAT", "json")
    monkeypatch.setenv("VCPO_LOG_FIELDS", '{"part": "rollout", "worker": "main-0"}')
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", str(_VLLM_LOGGING))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    configure_logging(LoggingConfig())  # as each of vLLM's processes does
    init_logger("vllm.v1.engine.core").warning("low memory")
    init_logger("vllm.v1.engine.core").info("not of this level")
    ours = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["message"] for line in ours if line["logger"] == "vllm.v1.engine.core"] == [
        "low memory"
    ]
    assert all((line["part"], line["worker"]) == ("rollout", "main-0") for line in ours)
