"""Log lines of vLLM: they have our form, and those of its reload name no buffers."""

import json
import logging
import os
import subprocess
import sys

import pytest
from torch import nn, zeros

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


LINES_OF_VLLM = """
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging, init_logger

configure_logging(LoggingConfig())  # as each of vLLM's processes does
init_logger("vllm.v1.engine.core").warning("low memory")
init_logger("vllm.v1.engine.core").info("not of this level")
"""


def test_vllm_writes_lines_with_the_fields_of_its_worker():
    # In a process of its own: an engine that was started in this one keeps its settings.
    ran = subprocess.run(
        [sys.executable, "-c", LINES_OF_VLLM],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "VCPO_LOG_FORMAT": "json",
            "VCPO_LOG_FIELDS": '{"part": "rollout", "worker": "main-0"}',
            "VLLM_LOGGING_CONFIG_PATH": str(_VLLM_LOGGING),
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    ours = [json.loads(line) for line in ran.stderr.splitlines()]
    assert [line["message"] for line in ours if line["logger"] == "vllm.v1.engine.core"] == [
        "low memory"
    ]
    assert all((line["part"], line["worker"]) == ("rollout", "main-0") for line in ours)
