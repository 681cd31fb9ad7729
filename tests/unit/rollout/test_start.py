"""What a worker checks before it serves."""

from __future__ import annotations

import sys

import pytest

from vcpo.api import parse_run, run_to_yaml
from vcpo.local.preflight import with_local_paths
from vcpo.service.lifecycle import StartError
from vcpo_rollout.app import Options, run_worker

RUN = """
metadata: {name: r}
spec: {model: {name: m}, environment: {name: "beside_the_file:Task"}, steps: 1}
"""
TASK = """
class Task:
    def __init__(self, *, seed): ...
    def prompt(self, split, index): ...
    def reward(self, prompt, response): return 0.0
"""


def options(run_file) -> Options:
    """Of a worker that gets as far as its metrics' address, which is none."""
    return Options(
        run_file=run_file,
        learner="127.0.0.1:1",
        group="main",
        worker_id="w",
        listen="127.0.0.1:0",
        metrics_listen="nowhere",
        drain_s=0.0,
        tls=None,
        plain_text=False,
        health_listen=None,
        ready_file=None,
        exit_with_parent=False,
    )


@pytest.fixture
def run_dir_file(tmp_path, monkeypatch):
    """The file that a run directory holds, of a run whose own file lay in another folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "beside_the_file", raising=False)
    run = with_local_paths(parse_run(RUN), tmp_path / "mine" / "run.yaml")
    path = tmp_path / "spec.yaml"
    path.write_text(run_to_yaml(run))
    (tmp_path / "mine").mkdir()
    return path


async def test_an_environment_beside_the_runs_file_is_found_from_the_run_directory(run_dir_file):
    (run_dir_file.parent / "mine" / "beside_the_file.py").write_text(TASK)
    with pytest.raises(StartError, match="address: must be host:port, got 'nowhere'"):
        await run_worker(options(run_dir_file))


async def test_one_that_is_not_there_is_named_before_anything_is_loaded(run_dir_file):
    with pytest.raises(StartError, match=r"'beside_the_file:Task' cannot be imported"):
        await run_worker(options(run_dir_file))
