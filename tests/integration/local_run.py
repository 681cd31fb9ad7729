"""One `vcpo run` process on a small task, forked from one that has done its imports."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.fixtures.forks import CONTEXT
from vcpo.cli.main import app
from vcpo.records.journal import EventRecord, Metrics, read_events, read_metrics
from vcpo.service.process import end_with

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0
POLL_S = 0.05
SPEC = """
apiVersion: vcpo.dev/v1alpha1
kind: VCPORun
metadata: {{name: small}}
spec:
  model: {{name: {model}{adapters}}}
  environment: {{name: {environment}, parameters: {{digits: 5, style: plain}}}}
  steps: {steps}
  sampling: {{maxNewTokens: 8}}
  batch: {{promptsPerStep: 4, trajectoriesPerPrompt: 4}}
  algorithm: {{maxPolicyLagSteps: {lag}}}
  optimizer: {{learningRate: 1e-4}}
  evaluation: {{everySteps: 1000, prompts: 16}}
  checkpoint: {{everySteps: 5}}
  failurePolicy: {{maxFailuresInARow: {failures}}}
  control: {{pollSeconds: 0.2{control}}}
  tracking: {{sinks: [{sinks}]}}
  learner: {{threads: 1{learner}}}
  rollouts:
    - name: main
      minReplicas: {workers}
      maxReplicas: {workers}
      maxConcurrentSequences: 8
      threads: 1
"""


@dataclass
class LocalRun:
    """One `vcpo run` process and its directory."""

    process: BaseProcess
    path: Path
    output: Path
    """What it prints."""

    @property
    def metrics(self) -> Metrics:
        return read_metrics(self.path)

    @property
    def events(self) -> tuple[EventRecord, ...]:
        return read_events(self.path)

    def pid_of(self, name: str) -> int:
        ready_file = self.path / "processes" / f"{name}.json"
        wait_until(ready_file.exists, f"{name} to be ready", self)
        return int(json.loads(ready_file.read_text())["pid"])

    def pids(self) -> list[int]:
        files = (self.path / "processes").glob("*.json")
        return [int(json.loads(file.read_text())["pid"]) for file in files]

    def metrics_port_of(self, name: str) -> int:
        self.pid_of(name)
        ready_file = self.path / "processes" / f"{name}.json"
        return int(json.loads(ready_file.read_text())["metrics_port"])

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            steps = self.metrics.steps
            return bool(steps) and steps[-1].step >= step

        wait_until(reached, f"step {step}", self)

    def finish(self) -> tuple[int, dict[str, Any]]:
        self.process.join(PATIENCE_S)
        assert self.process.exitcode is not None, f"it runs after {PATIENCE_S} s"
        return self.process.exitcode, json.loads(self.output.read_text().splitlines()[-1])


def assert_accounting_is_exact(summary: dict[str, Any]) -> None:
    counts = summary["trajectories"]
    dropped = sum(counts["dropped"].values())
    total = counts["consumed"] + counts["in_flight"] + counts["buffered"] + dropped
    assert counts["leased"] == total


def wait_until(condition: Callable[[], bool], what: str, run: LocalRun) -> None:
    """Wait for something that a run will do; a run that ends first is a failure."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if not run.process.is_alive():
            logs = "\n".join(log.read_text()[-2000:] for log in (run.path / "logs").glob("*.log"))
            raise AssertionError(f"the run ended while waiting for {what}:\n{logs}")
        assert time.monotonic() < deadline_s, f"no {what} within {PATIENCE_S} s"
        time.sleep(POLL_S)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for_exit(pids: list[int]) -> None:
    """Wait until none of the processes is alive."""
    deadline_s = time.monotonic() + PATIENCE_S
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline_s, f"still alive after {PATIENCE_S} s: {alive}"
        time.sleep(POLL_S)


StartRun = Callable[..., LocalRun]


@contextlib.contextmanager
def runs_in(folder: Path) -> Iterator[StartRun]:
    """Start runs on the small task in a folder; whatever is left of them is killed at the end."""
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
        name: str = "run",
        model: Path = ROOT / "examples/models/tiny",
    ) -> LocalRun:
        spec = folder / "run.yaml"
        task = {"steps": steps, "environment": environment, "adapters": adapters}
        task |= {"lag": lag, "workers": workers, "failures": failures}
        sections = {"control": control, "learner": learner, "sinks": sinks}
        spec.write_text(SPEC.format(model=model, **sections, **task))
        path, output = folder / name, folder / f"{len(started)}.out"
        arguments = ["run", str(spec), "--json", f"--run-dir={path}", *options]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = CONTEXT.Process(target=_command, args=(arguments, environment, output))
        process.start()
        started.append(LocalRun(process=process, path=path, output=output))
        return started[-1]

    try:
        yield start
    finally:
        for run in started:
            for pid in (run.process.pid, *run.pids()):
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)
            run.process.join()


def _command(arguments: list[str], environment: dict[str, str], output: Path) -> None:
    """Be the command `vcpo`, which prints to a file; the folder of the file is the current one."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(output.parent)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
    sys.argv = ["vcpo", *arguments]
    end_with(app)
