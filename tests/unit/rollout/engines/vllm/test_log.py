"""Log lines of vLLM: they have our form, and those of its reload name no buffers."""

import json
import os
import subprocess
import sys

from vcpo_rollout.engines.factory import _VLLM_LOGGING

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
