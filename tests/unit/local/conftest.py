"""A fleet of small stand-ins for learner and worker, under their module names."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from vcpo.local.processes.child import ChildProcess
from vcpo.local.processes.fleet import Fleet
from vcpo.local.run_dir import RunDir
from vcpo.spec import parse_run

TIMEOUT_S = 60
STAND_IN = """
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ)}), flush=True)
if "EXIT" in os.environ:
    print("the reason", flush=True)
    sys.exit(int(os.environ["EXIT"]))
sys.stdin.read()
"""
RUN = parse_run("""
metadata: {name: r}
spec:
  model: {name: m}
  environment: {name: countdown}
  steps: 3
  learner: {threads: 5}
  rollouts: [{name: main, maxReplicas: 4, threads: 2}, {name: other, maxReplicas: 4}]
""")


class Clock:
    """Moved by hand."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    directory = RunDir(tmp_path / "r")
    directory.create(RUN)
    return directory


@pytest.fixture
async def fleet(run_dir, clock, tmp_path, monkeypatch) -> AsyncIterator[Fleet]:
    for module in ("vcpo_learner", "vcpo_rollout"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__main__.py").write_text(STAND_IN, encoding="utf-8")
        (tmp_path / module / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fleet = Fleet(RUN, run_dir, clock=clock)
    yield fleet
    await fleet.stop(0.0)


def ended(child: ChildProcess) -> ChildProcess:
    """Wait for a child's end."""
    child.process.wait(TIMEOUT_S)
    return child
