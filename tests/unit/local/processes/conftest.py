"""A fleet of fake processes under the module names of learner and worker."""

from collections.abc import AsyncIterator

import pytest

from tests.unit.local.processes.fake_processes import FAKE_PROCESS, RUN, Clock
from vcpo.local.processes.fleet import Fleet
from vcpo.local.run_dir import RunDir


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
        (tmp_path / module / "__main__.py").write_text(FAKE_PROCESS, encoding="utf-8")
        (tmp_path / module / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fleet = Fleet(RUN, run_dir, clock=clock)
    yield fleet
    await fleet.stop(0.0)
