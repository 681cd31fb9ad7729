"""Settings of every test."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tiny tensors on a few cores: threads of the tensor library would only wait for each other.
# Read when the library is loaded, so it is set before anything else is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A loaded machine is slow; how long an example takes says nothing about its correctness.
settings.register_profile("vcpo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vcpo")

ROOT = Path(__file__).resolve().parents[1]
LONG = tuple(
    str(ROOT / "tests" / folder)
    for folder in (
        "chaos",
        "e2e/test_cluster.py",
        "unit/rollout/engines/vllm",
        "unit/learner/ranks",
        "integration",
    )
)
"""Files that start engines, ranks or whole runs, and take up to minutes each."""


@pytest.fixture(autouse=True)
def denormals_are_numbers():
    """Undo what a learner does to its process, where a test makes one: hypothesis needs them."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_flush_denormal(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long: no process then has one alone at the end."""
    items.sort(key=lambda item: not str(item.path).startswith(LONG))
