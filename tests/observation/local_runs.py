"""Runs of `vcpo run`, one after the other, that one Prometheus scrapes and judges by our rules."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fixtures.observation.prometheus_server import PrometheusServer, prometheus_server
from tests.fixtures.rules.variants import scaled_rules
from vcpo.local.processes.child import free_port
from vcpo.local.run_dir import RunDir
from vcpo.records.journal import EventRecord, Metrics, read_events, read_metrics
from vcpo.service.lifecycle import read_ready

ROOT = Path(__file__).resolve().parents[2]
HEALTHY = ROOT / "examples/sort_digits.yaml"
VLLM = ROOT / "examples/sort_digits_vllm.yaml"
COLLAPSE = ROOT / "examples/collapse.yaml"
ONE_PART = "environment.rewards=[{name: environment}]"
"""The task's own reward, as the one part of a reward that has parts."""
SCALE = 1 / 60
"""Factor on the durations of the rules: a second of these runs stands for a minute."""
SCRAPE_INTERVAL_MS = 250
"""A critical warning of a run whose steps take a third of a second lasts about two seconds."""
LIMIT_S = 400.0
_AFTERWARDS_S = 10.0
"""Time that Prometheus goes on after the end of a run: what fires then fires on a finished run."""
_GRACE_S = 30.0
_PARTS = {name: name for name in ("host", "learner")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """A run that has ended, and the time in which it was observed."""

    name: str
    """Name of its directory; the label `run` of its series."""
    path: Path
    """Its run directory."""
    started_s: float
    ended_s: float
    """Unix times; at the later one its processes were gone."""
    status: int
    """Exit status of `vcpo run`."""
    output: str

    @property
    def metrics(self) -> Metrics:
        return read_metrics(self.path)

    @property
    def events(self) -> tuple[EventRecord, ...]:
        return read_events(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The runs, and the Prometheus that still has what it saw of them."""

    server: PrometheusServer
    healthy: ObservedRun
    collapsed: ObservedRun
    vllm: ObservedRun
    """A run with the other engine, for its metrics: in the rules' faster time its start takes as
    long as that of a worker that does not come up, and they say so."""

    @property
    def runs(self) -> tuple[ObservedRun, ...]:
        return self.healthy, self.collapsed, self.vllm


@contextlib.contextmanager
def observed_runs(root: Path) -> Iterator[Observation]:
    """Run the examples one after the other under the eyes of a Prometheus."""
    rules = root / "rules.yaml"
    rules.write_text(scaled_rules(SCALE, scrape_interval_ms=SCRAPE_INTERVAL_MS))
    paths = [root / spec.stem for spec in (HEALTHY, COLLAPSE, VLLM)]
    targets = [root / f"{path.name}.targets.json" for path in paths]
    with prometheus_server(
        root, targets=targets, rules=[rules], scrape_interval_ms=SCRAPE_INTERVAL_MS
    ) as server:
        yield Observation(
            server=server,
            healthy=_observe(HEALTHY, paths[0], f"--set={ONE_PART}", afterwards_s=_AFTERWARDS_S),
            collapsed=_observe(COLLAPSE, paths[1], afterwards_s=_AFTERWARDS_S),
            vllm=_observe(VLLM, paths[2], afterwards_s=0.0),  # nobody asks for its alerts
        )


def _observe(spec: Path, path: Path, *options: str, afterwards_s: float) -> ObservedRun:
    """Run a spec to its end, and wait until what fires on a finished run would have fired.

    options: more of `vcpo run`.
    afterwards_s: how long.

    Raises:
        subprocess.TimeoutExpired: when it does not come to its end.
    """
    command = [sys.executable, "-m", "vcpo.cli.main", "run", str(spec), "--json"]
    started_s, port = time.time(), free_port()
    process = subprocess.Popen(
        [*command, f"--run-dir={path}", f"--metrics-port={port}", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    over = threading.Event()
    naming = threading.Thread(target=_name_targets, args=[path, port, over])
    naming.start()
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        _end(process)
        over.set()
        naming.join()
    time.sleep(afterwards_s)
    return ObservedRun(
        name=path.name,
        path=path,
        started_s=started_s,
        ended_s=time.time(),
        status=process.returncode,
        output=output,
    )


def _name_targets(path: Path, host_port: int, over: threading.Event) -> None:
    """Keep the file of targets of a run equal to its live processes, until the run is over."""
    file = path.with_name(f"{path.name}.targets.json")
    while not over.wait(0.5):
        ports = {"host": host_port}
        for ready in RunDir(path).processes.glob("*.json"):
            told = read_ready(ready)
            if told is not None and Path(f"/proc/{told.pid}").exists():
                ports[ready.stem] = told.metrics_port
        groups = [
            {
                "targets": [f"127.0.0.1:{port}"],
                "labels": {"run": path.name, "pod": name, "part": _PARTS.get(name, "rollout")},
            }
            for name, port in ports.items()
        ]
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(groups))
        partial.replace(file)
    file.unlink(missing_ok=True)


def _end(process: subprocess.Popen[str]) -> None:
    """End a run that has not ended by itself; its processes do not outlive the host."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        process.kill()
