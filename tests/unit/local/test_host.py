"""The local host with fake processes of learner and worker that speak the real wire."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.fixtures.records import EVALUATION, STEP
from vcpo.local.host import Host, HostOptions
from vcpo.local.run_dir import RunDir
from vcpo.local.terminal.ending import Ending, RunOutcome
from vcpo.local.terminal.run_view import RunView
from vcpo.records.journal import HOST_STARTED, EventRecord, Journal, read_events
from vcpo.service.lifecycle import read_ready
from vcpo.spec import parse_run

PATIENCE_S = 60.0
ROOT = Path(__file__).resolve().parents[3]
RUN = parse_run("""
metadata: {name: r}
spec:
  model: {name: m}
  environment: {name: countdown}
  steps: 300
  control: {pollSeconds: 0.1}
""")
SERVE = """
import argparse, asyncio, os, signal, sys
from pathlib import Path

from vcpo.service.lifecycle import Ready, on_parent_exit, write_ready
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import control_pb2, control_pb2_grpc

parser = argparse.ArgumentParser()
parser.add_argument("--ready-file", type=Path)
parser.add_argument("--listen", default="127.0.0.1:0")
parser.add_argument("--drained-status", type=int, default=0)
parser.add_argument("--resume", action="store_true")
options, _ = parser.parse_known_args()
if (switch := Path(os.environ["SWITCH"])).with_suffix(".stall").exists():
    switch.with_suffix(".stalls").write_text(str(os.getpid()))
    sys.stdin.read()

starts_over = options.resume and switch.with_suffix(".forgets").exists()
signals = control_pb2.Signals(
    step=0 if starts_over else 20,
    total_steps=300,
    phase=1,
    on_policy_ess_ratio=1.0,
    batch_trajectories=1,
    admission_lag_steps=9,  # more than the run's bound, so that the host sends its first limit
)

class Control(control_pb2_grpc.ControlServiceServicer):
    async def GetSignals(self, request, context):
        if switch.with_suffix(".fails").exists():
            raise RuntimeError("no signals")
        if switch.with_suffix(".sick").exists():
            signals.ess_ratio_mean = 0.05
        return signals

    async def SetThrottle(self, request, context):
        signals.admission_lag_steps = request.admission_lag_steps
        switch.with_suffix(".throttled").write_text(request.reason)
        return control_pb2.SetThrottleResponse(admission_lag_steps=request.admission_lag_steps)

    async def Drain(self, request, context):
        stop.set()
        return control_pb2.DrainResponse()

async def serve():
    global stop
    stop = asyncio.Event()
    server = WireServer(token=os.environ["VCPO_TOKEN"])
    control_pb2_grpc.add_ControlServiceServicer_to_server(Control(), server.grpc_server)
    port = await server.start(options.listen, [])
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    on_parent_exit(lambda _: stop.set())
    write_ready(options.ready_file, Ready(pid=os.getpid(), grpc_port=port, metrics_port=1))
    while not stop.is_set() and not switch.with_suffix(".complete").exists():
        await asyncio.sleep(0.02)
    await server.stop(0)
    print("resumed" if options.resume else "fresh", flush=True)
    sys.exit(options.drained_status if stop.is_set() else 0)

asyncio.run(serve())
"""


@dataclass
class RecordingView:
    """Keeps what it is shown."""

    views: list[RunView] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def update(self, view: RunView) -> None:
        self.views.append(view)

    def event(self, message: str) -> None:
        self.events.append(message)


class Clock:
    """The real clock, and what a test adds to it."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.added_s


class HostFixture:
    """A host at work on a run directory, and the files that command its fake processes."""

    def __init__(self, folder: Path) -> None:
        self.directory = RunDir(folder / "run")
        self.directory.create(RUN)
        self.switch = folder / "switch"
        self.view, self.clock = RecordingView(), Clock()
        options = HostOptions(resume=False, metrics_port=0, answer_timeout_s=0.5, clock=self.clock)
        self.host = Host(RUN, self.directory, self.view, options)
        self.running: asyncio.Task[RunOutcome] | None = None

    def start(self) -> None:
        self.running = asyncio.create_task(self.host.run())

    def tell(self, what: str) -> None:
        self.switch.with_suffix(f".{what}").touch()

    def unsay(self, what: str) -> None:
        self.switch.with_suffix(f".{what}").unlink()

    def pid_of(self, name: str) -> int | None:
        ready = read_ready(self.directory.ready_file(name))
        return None if ready is None else ready.pid

    def events(self, kind: str) -> list[str]:
        return [one.message for one in read_events(self.directory.path) if one.kind == kind]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                assert self.running is None or not self.running.done(), self.running
                await asyncio.sleep(0.02)

    async def until_answered(self, name: str) -> int:
        """Wait until a process serves and the host has signals; returns its pid."""
        await self.until(lambda: self.view.views and self.view.views[-1].phase == "running")
        await self.until(lambda: self.pid_of(name))
        pid = self.pid_of(name)
        assert pid is not None
        return pid

    async def outcome(self) -> RunOutcome:
        assert self.running is not None
        return await asyncio.wait_for(self.running, PATIENCE_S)

    def scraped(self) -> dict[str, tuple[str, list[str]]]:
        """Part and addresses by pod, as a Prometheus reads them."""
        groups = json.loads(self.directory.scrape_targets.read_text())
        assert {group["labels"]["run"] for group in groups} <= {"r"}
        return {
            group["labels"]["pod"]: (group["labels"]["part"], group["targets"]) for group in groups
        }

    def sample(self, name: str, **labels: str) -> float | None:
        """A value that the host exports of its run."""
        registry = self.host._metrics.registry
        return registry.get_sample_value(name, {"namespace": "", "run": "r", **labels})

    def failures(self, role: str, cause: str) -> float | None:
        return self.sample("vcpo_run_process_failures_total", role=role, cause=cause)


@pytest.fixture
async def fixture(tmp_path, monkeypatch) -> AsyncIterator[HostFixture]:
    for module in ("vcpo_learner", "vcpo_rollout"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__main__.py").write_text(SERVE, encoding="utf-8")
        (tmp_path / module / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT / "core")]))
    monkeypatch.setenv("SWITCH", str(tmp_path / "switch"))
    fixture = HostFixture(tmp_path)
    yield fixture
    if fixture.running is not None:
        fixture.running.cancel()
        await asyncio.gather(fixture.running, return_exceptions=True)


@pytest.fixture
def one_gpu(tmp_path, monkeypatch) -> None:
    """A machine whose driver knows of one."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H200, 143771'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("one_gpu")
async def test_who_gets_which_gpu_is_said(fixture):
    fixture.start()
    await fixture.until(lambda: fixture.events("Gpus"))
    (said,) = fixture.events("Gpus")
    assert said.startswith("learner on GPU 0, rollout workers on GPU 0: they share its memory, ")


async def test_a_learner_killed_while_it_starts_is_started_again(fixture):
    fixture.tell("stall")
    fixture.start()
    await fixture.until(fixture.switch.with_suffix(".stalls").exists)
    fixture.unsay("stall")
    os.kill(fixture.host._fleet.learner.process.pid, signal.SIGKILL)
    await fixture.until_answered("learner")
    (restarted,) = fixture.events("LearnerRestarted")
    assert restarted.startswith("it was killed by SIGKILL")
    assert restarted.endswith("restart 1 of 3 without progress")
    fixture.tell("complete")
    assert (await fixture.outcome()).ending is Ending.COMPLETE


async def test_the_startup_deadline_acts_while_a_learner_is_stopped_before_it_serves(fixture):
    fixture.tell("stall")
    fixture.start()
    await fixture.until(fixture.switch.with_suffix(".stalls").exists)
    os.kill(fixture.host._fleet.learner.process.pid, signal.SIGSTOP)
    fixture.clock.added_s = 1801.0
    outcome = await fixture.outcome()
    assert outcome.ending is Ending.FAILED
    assert "`spec.startupDeadlineSeconds`: the run took no step within 1800 s." in outcome.message


async def test_the_startup_deadline_does_not_act_on_a_run_that_starts_over(fixture):
    fixture.tell("forgets")
    fixture.start()
    first = await fixture.until_answered("learner")
    await fixture.until(lambda: fixture.view.views[-1].step == 20)
    os.kill(first, signal.SIGKILL)
    await fixture.until(lambda: fixture.view.views[-1].step == 0)
    fixture.clock.added_s = 1801.0
    views = len(fixture.view.views)
    await fixture.until(lambda: len(fixture.view.views) > views + 1)
    assert fixture.events("Failed") == []
    assert len(fixture.events("LearnerRestarted")) == 1


async def test_a_run_is_not_complete_when_somebody_ends_its_learner(fixture):
    fixture.start()
    first = await fixture.until_answered("learner")
    os.kill(first, signal.SIGTERM)
    await fixture.until(lambda: fixture.events("LearnerRestarted"))
    await fixture.until(lambda: fixture.pid_of("learner") not in {None, first})
    assert fixture.events("LearnerRestarted") == [
        "it was stopped from outside this run; restart 1 of 3 without progress"
    ]
    fixture.tell("complete")
    assert (await fixture.outcome()).ending is Ending.COMPLETE
    assert fixture.directory.log("learner").read_text() == "fresh\nresumed\n"


async def test_a_learner_that_hangs_is_killed_and_started_again(fixture):
    fixture.start()
    first = await fixture.until_answered("learner")
    os.kill(first, signal.SIGSTOP)
    views = len(fixture.view.views)
    await fixture.until(lambda: len(fixture.view.views) > views + 1)
    assert fixture.events("LearnerRestarted") == []
    fixture.clock.added_s = 61.0
    await fixture.until(lambda: fixture.events("LearnerRestarted"))
    (restarted,) = fixture.events("LearnerRestarted")
    assert re.match(r"it did not answer for 6\d s and was killed \(log: ", restarted)
    assert fixture.failures("learner", "hung") == 1.0
    await fixture.until(lambda: fixture.sample("vcpo_run_learner_restarts_total") == 1.0)
    (stale,) = fixture.events("SignalsStale")
    assert re.match(
        r"the newest signals of the learner are 6\d s old \(deadline exceeded.*\): lag limit and"
        " workers stay as they are",
        stale,
    )
    # What was shown meanwhile says how old it is.
    assert max(view.signals_age_s for view in fixture.view.views if view.signals_age_s) >= 61.0
    await fixture.until(lambda: fixture.pid_of("learner") not in {None, first})
    await fixture.until(lambda: fixture.view.views[-1].signals_age_s < 10.0)
    (fresh,) = fixture.events("SignalsFresh")
    assert re.match(r"the learner answers again after 6\d s", fresh)


async def test_a_learner_that_fails_to_tell_its_signals_lives(fixture):
    fixture.start()
    first = await fixture.until_answered("learner")
    fixture.tell("fails")
    for _ in range(2):
        fixture.clock.added_s += 61.0
        views = len(fixture.view.views)
        await fixture.until(lambda seen=views: len(fixture.view.views) > seen + 1)
    assert fixture.view.views[-1].signals_age_s >= 61.0
    assert fixture.events("LearnerRestarted") == []
    assert fixture.pid_of("learner") == first
    fixture.unsay("fails")
    await fixture.until(lambda: fixture.view.views[-1].signals_age_s < 10.0)


async def test_a_worker_that_hangs_is_replaced(fixture):
    fixture.start()
    await fixture.until_answered("learner")
    worker = await fixture.until_answered("main-0")
    os.kill(worker, signal.SIGSTOP)
    views = len(fixture.view.views)
    await fixture.until(lambda: len(fixture.view.views) > views + 1)
    fixture.clock.added_s = 61.0
    await fixture.until(lambda: fixture.pid_of("main-1"))
    (lost,) = fixture.events("WorkerLost")
    assert re.match(r"main-0 did not answer for 6\d s and was killed \(log: ", lost)
    assert fixture.failures("rollout", "hung") == 1.0
    assert fixture.failures("learner", "hung") == 0.0


async def test_a_learner_is_told_why_it_is_throttled(fixture):
    fixture.tell("sick")  # its mean ESS ratio is 0.05, half of the floor
    fixture.start()
    told = fixture.switch.with_suffix(".throttled")
    await fixture.until(lambda: told.exists() and told.read_text())
    assert told.read_text() == "the ESS ratio is 5.0% of the on-policy ratio"


async def test_the_hosts_metrics_are_where_the_first_event_says(fixture):
    fixture.start()
    await fixture.until(lambda: fixture.events("MetricsServed"))
    (served,) = fixture.events("MetricsServed")
    url, _, rest = served.partition("; ")
    assert rest.endswith(f"Prometheus: {fixture.directory.scrape_targets}")
    with await asyncio.to_thread(urllib.request.urlopen, url) as response:
        assert b"vcpo_build_info" in response.read()


async def test_the_host_exports_what_it_knows_of_the_run(fixture):
    fixture.start()
    await fixture.until_answered("main-0")
    await fixture.until(lambda: fixture.sample("vcpo_run_admission_lag_steps") == 8.0)
    await fixture.until(lambda: fixture.sample("vcpo_run_throttle_orders_total", result="ok"))
    info = {"model": "m", "environment": "countdown", "method": "vcpo"}
    assert fixture.sample("vcpo_run_info", **info) == 1.0
    assert fixture.sample("vcpo_run_steps") == 300.0
    ready = {"group": "main", "state": "ready"}
    await fixture.until(lambda: fixture.sample("vcpo_run_replicas", **ready) == 1.0)
    assert fixture.sample("vcpo_run_signals_age_seconds") < PATIENCE_S
    fresh = {"condition": "SignalsFresh", "reason": "Fresh"}
    assert fixture.sample("vcpo_run_condition_reason", **fresh) == 1.0
    requests = {"source": "learner", "result": "ok"}
    assert fixture.sample("vcpo_run_signal_requests_total", **requests) >= 1.0
    assert fixture.sample("vcpo_run_learner_restarts_total") == 0.0
    # The learner of this fixture has taken 20 steps when it is first asked.
    assert fixture.sample("vcpo_run_startup_deadline_timestamp_seconds") is None
    started_s = fixture.sample("vcpo_run_start_timestamp_seconds")
    assert abs(started_s - time.time()) < PATIENCE_S


async def test_a_prometheus_finds_each_process_from_its_start_to_its_end(fixture):
    fixture.start()
    worker = await fixture.until_answered("main-0")
    await fixture.until(lambda: len(fixture.scraped()) == 3)
    (served,) = fixture.events("MetricsServed")
    port = re.match(r"http://127.0.0.1:(\d+)/metrics", served)[1]
    assert fixture.scraped() == {
        "host": ("host", [f"127.0.0.1:{port}"]),
        "learner": ("learner", ["127.0.0.1:1"]),
        "main-0": ("rollout", ["127.0.0.1:1"]),
    }
    os.kill(worker, signal.SIGKILL)
    await fixture.until(lambda: "main-1" in fixture.scraped())
    assert "main-0" not in fixture.scraped()
    fixture.tell("complete")
    await fixture.outcome()
    assert fixture.scraped() == {}


async def test_what_the_learner_writes_down_is_shown(fixture):
    fixture.start()
    await fixture.until_answered("learner")
    Journal(fixture.directory.path).event(
        EventRecord(time_unix_s=1.0, source="learner", kind="Warning", message="batch: small")
    )
    await fixture.until(lambda: "Warning: batch: small" in fixture.view.events)


async def test_a_run_that_never_updated_is_no_plain_success(fixture):
    fixture.start()
    await fixture.until_answered("learner")
    for step in range(1, 4):
        skipped = replace(STEP, step=step, skipped="no_gradient")
        Journal(fixture.directory.path).step(skipped)
    fixture.tell("complete")
    outcome = await fixture.outcome()
    assert outcome.ending is Ending.COMPLETE_WITHOUT_UPDATE
    assert fixture.events("Complete") == [f"300 steps. {outcome.message}"]
    assert "(3 of 3 were skipped)" in outcome.message


async def test_a_run_that_collapsed_ends_with_that_word(fixture):
    fixture.start()
    await fixture.until_answered("learner")
    journal = Journal(fixture.directory.path)
    journal.step(STEP)
    for step, accuracy in ((0, 0.9), (1, 0.1)):
        journal.evaluation(replace(EVALUATION, step=step, accuracy=accuracy))
    fixture.tell("complete")
    outcome = await fixture.outcome()
    assert outcome.ending is Ending.COLLAPSED
    assert fixture.events("Collapsed") == [f"300 steps. {outcome.message}"]
    assert fixture.events("Complete") == []


async def test_the_first_event_of_a_run_is_its_start(fixture):
    fixture.start()
    await fixture.until_answered("learner")
    first = read_events(fixture.directory.path)[0]
    assert (first.source, first.kind) == ("host", HOST_STARTED)
    fixture.tell("complete")
    await fixture.outcome()


async def test_an_interrupted_run_ends_with_nobody_left(fixture):
    fixture.start()
    pids = [await fixture.until_answered("learner"), await fixture.until_answered("main-0")]
    os.kill(os.getpid(), signal.SIGINT)
    assert (await fixture.outcome()).ending is Ending.INTERRUPTED
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
