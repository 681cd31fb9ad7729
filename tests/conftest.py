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
    ROOT / line
    for line in (ROOT / "tests" / "long.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)
if missing := [path for path in LONG if not path.exists()]:
    raise pytest.UsageError(f"tests/long.txt names what is not there: {missing[0]}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make test-all` ask for everything."""
    parser.addoption("--long", action="store_true", help="also run what tests/long.txt names")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out long files, which import engines and whole runs, unless they are asked for."""
    if config.getoption("--long") or not is_long(collection_path):
        return None
    named = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    return not any(
        collection_path == path
        or collection_path in path.parents
        or (path in collection_path.parents and is_long(path))
        for path in named
    )


def is_long(path: Path) -> bool:
    """Say whether a file or folder is one of those of tests/long.txt, or in one."""
    return path in LONG or not set(LONG).isdisjoint(path.parents)


@pytest.fixture(autouse=True)
def denormals_are_numbers():
    """Undo what a learner does to its process, where a test makes one: hypothesis needs them."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_flush_denormal(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long: no process then has one alone at the end."""
    items.sort(key=lambda item: not is_long(item.path))
