"""Real runs for the integration tests: `vcpo run` as a user starts it, on a small task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.browser import Browser, find_chromium
from tests.integration.local_run import ROOT, SPEC, LocalRun, StartRun, is_alive


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium for all tests; a machine without one skips them, but not the CI."""
    found = find_chromium()
    if found is None and os.environ.get("CI") == "true":
        pytest.fail("CI must have a browser, and no Chromium is on the PATH")
    if found is None:
        pytest.skip("no Chromium is on the PATH")
    with Browser(found, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[StartRun]:
    """Start `vcpo run` on the small task; whatever is left of it is killed afterwards."""
    started: list[LocalRun] = []

    def start(
        *options: str,
        steps: int = 12,
        environment: str = "sort_digits",
        adapters: str = "",
        control: str = "",
        learner: str = "",
        sinks: str = "",
        lag: int = 4,
        workers: int = 2,
        failures: int = 32,
        folder: str = "run",
    ) -> LocalRun:
        spec, model = tmp_path / "run.yaml", ROOT / "examples/models/tiny"
        task = {"steps": steps, "environment": environment, "adapters": adapters}
        task |= {"lag": lag, "workers": workers, "failures": failures}
        sections = {"control": control, "learner": learner, "sinks": sinks}
        spec.write_text(SPEC.format(model=model, **sections, **task))
        path = tmp_path / folder
        command = [sys.executable, "-m", "vcpo.cli.main", "run", str(spec), "--json"]
        process = subprocess.Popen(
            [*command, f"--run-dir={path}", *options],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started.append(LocalRun(process=process, path=path))
        return started[-1]

    yield start
    for run in started:
        for pid in (run.process.pid, *run.pids()):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        run.process.communicate()
