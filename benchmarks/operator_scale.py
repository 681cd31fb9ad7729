"""Measure what many runs cost the operator: latency, memory, and calls to the API server.

The operator runs in its own process against a fake API server in this one. This process is also the
learner of every run; its signals never change, so that runs stay quiet. No pod runs. The operator
polls learners every `--poll-seconds`.

    python -m benchmarks.operator_scale

The last line printed is JSON:

    reconcile_p99_s           from a change of a run's spec to the change of its StatefulSet
    rss_mb                    memory of the operator's process at the end
    idle_writes_per_hour      writes of all runs while nothing changes
    api_calls_per_run_create  calls from the creation of a run until nothing is left to do

Exit status 1 when a bar is missed: p99 of 1 s, 250 MB, no idle write.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.harness.measures import parser_of, resident_bytes
from tests.fakes.kubelet.client import KubeClient
from tests.fakes.kubelet.network import ClusterNetwork
from tests.fakes.kubelet.settings import ApiAccess
from tests.fakes.kubernetes.api_server import FakeApiServer
from tests.fakes.kubernetes.recorder import WRITES
from tests.fakes.kubernetes.store import Event
from tests.fixtures.kubernetes.control_plane import ControlPlane
from tests.fixtures.kubernetes.operator_process import operator_process
from vcpo.metrics.step_gauges import record_of_metrics
from vcpo.records.step_record import record_to_json
from vcpo.wire.phase import RunPhase, phase_to_message
from vcpo.wire.v1 import control_pb2, control_pb2_grpc
from vcpo_operator.crd import run_crd
from vcpo_operator.names import RUN_LABEL

RUNS = "/apis/vcpo.dev/v1alpha1/namespaces/default/vcporuns"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_RUN_KEY = ("vcpo.dev", "vcporuns")
_STATEFUL_SETS = ("apps", "statefulsets")
_OTHERS = ("kubelet", "kubectl")
"""User agents of this benchmark and of people; all others are the operator's."""
_QUIET_S = 5.0
_P99_BAR_S, _RSS_BAR_MB = 1.0, 250.0


class QuietLearner(control_pb2_grpc.ControlServiceServicer):
    """The learner of every run; its signals never change."""

    def __init__(self) -> None:
        self.questions = 0

    async def GetSignals(self, request: Any, context: Any) -> control_pb2.Signals:  # noqa: N802
        """Return the signals of a balanced run in its middle."""
        self.questions += 1
        ess = {"vcpo_ess_mean_ratio": 0.8, "vcpo_ess_low_ratio": 0.8}
        last = record_of_metrics(
            ess | {"vcpo_on_policy_ess_ratio": 1.0}, step=10, ess_ratio=0.8, lag_p50=1, lag_max=2
        )
        return control_pb2.Signals(
            last_step=record_to_json(last),
            phase=phase_to_message(RunPhase.RUNNING),
            policy_version=10,
            batch_trajectories=128,
            lag_limit_steps=8,
            learner_idle_ratio=0.1,
        )

    async def SetThrottle(self, request: Any, context: Any) -> control_pb2.SetThrottleResponse:  # noqa: N802
        return control_pb2.SetThrottleResponse(lag_limit_steps=request.lag_limit_steps)

    async def Drain(self, request: Any, context: Any) -> control_pb2.DrainResponse:  # noqa: N802
        return control_pb2.DrainResponse()


class OneAddress(ClusterNetwork):
    """A resolver in which every name has one address."""

    address: tuple[str, int] = ("127.0.0.1", 0)

    async def resolve(self, host: str, port: int, caller_namespace: str) -> tuple[str, int]:
        return self.address


@dataclass(slots=True)
class Stopwatch:
    """Times from a change of a run's spec to the change of its StatefulSet, in seconds."""

    latencies_s: list[float] = field(default_factory=list)
    _changed_s: dict[str, float] = field(default_factory=dict)

    def see(self, event: Event) -> None:
        """Note a change in the server's store."""
        if event.kind != "MODIFIED" or not _is_new_generation(event):
            return
        metadata = event.body["metadata"]
        if event.resource == _RUN_KEY:
            self._changed_s[metadata["name"]] = time.monotonic()
        elif event.resource == _STATEFUL_SETS:
            since_s = self._changed_s.pop(metadata["labels"][RUN_LABEL], None)
            if since_s is not None:
                self.latencies_s.append(time.monotonic() - since_s)


def _is_new_generation(event: Event) -> bool:
    before = event.before or {"metadata": {}}
    generation: int = event.body["metadata"].get("generation", 0)
    return bool(generation > before["metadata"].get("generation", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOperator:
    """A fake API server and the measured operator."""

    server: FakeApiServer
    client: KubeClient
    learner: QuietLearner
    operator_pid: int

    def calls(self) -> int:
        return sum(each.verb != "watch" for each in self._of_operator())

    def writes(self) -> int:
        return sum(each.verb in WRITES for each in self._of_operator())

    def rss_mb(self) -> float:
        return resident_bytes(self.operator_pid) / 2**20

    async def until_quiet(self) -> float:
        """Wait until the operator sends no request for a while; return the last one's time."""
        calls, last_s = self.calls(), time.monotonic()
        while time.monotonic() - last_s < _QUIET_S:
            await asyncio.sleep(0.2)
            if self.calls() != calls:
                calls, last_s = self.calls(), time.monotonic()
        return last_s

    def _of_operator(self) -> list[Any]:
        recorder = self.server.recorder
        return [each for each in recorder if not each.user_agent.startswith(_OTHERS)]


@contextlib.asynccontextmanager
async def run_operator() -> AsyncIterator[MeasuredOperator]:
    """Start the server, the learner of all runs, and the operator."""
    async with contextlib.AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vcpo-scale-")))
        server = await stack.enter_async_context(FakeApiServer())
        access = ApiAccess(url=server.url)
        client = await stack.enter_async_context(KubeClient(access))
        await client.create(DEFINITIONS, run_crd())
        answering, learner = grpc.aio.server(), QuietLearner()
        control_pb2_grpc.add_ControlServiceServicer_to_server(learner, answering)
        network = await stack.enter_async_context(OneAddress(client))
        network.address = ("127.0.0.1", answering.add_insecure_port("127.0.0.1:0"))
        await answering.start()
        stack.push_async_callback(answering.stop, None)
        kubeconfig = root / "kubeconfig.json"
        kubeconfig.write_text(json.dumps(server.kubeconfig()))
        plane = ControlPlane(kind="fake", access=access, kubeconfig=kubeconfig)
        process = await stack.enter_async_context(operator_process(plane, network, root))
        yield MeasuredOperator(
            server=server, client=client, learner=learner, operator_pid=process.pid
        )


def run_body(number: int, poll_s: float) -> dict[str, Any]:
    """Return the body of one run."""
    spec = {
        "model": {"name": "m"},
        "environment": {"name": "countdown"},
        "steps": 1000,
        "control": {"pollSeconds": poll_s},
        "rollouts": [{"name": "main", "minReplicas": 1, "maxReplicas": 4}],
    }
    metadata = {"name": f"run-{number:04}", "namespace": "default"}
    kind = {"apiVersion": "vcpo.dev/v1alpha1", "kind": "VCPORun"}
    return {**kind, "metadata": metadata, "spec": spec}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Create the runs, let them idle, change some, and return the figures."""
    async with run_operator() as here:
        started_s = time.monotonic()
        for number in range(options.runs):
            await here.client.create(RUNS, run_body(number, options.poll_seconds))
        quiet_s = await here.until_quiet()
        calls = here.calls()
        print(f"{options.runs} runs created and made in {quiet_s - started_s:.1f} s", flush=True)
        here.server.recorder.clear()
        asked = here.learner.questions
        await asyncio.sleep(options.idle_seconds)
        idle_writes, asked = here.writes(), here.learner.questions - asked
        rest = f"{options.idle_seconds:g} s of rest"
        print(f"{rest}: {here.calls()} calls, learners asked {asked} times", flush=True)
        latencies_s = await change_some(here, options)
        percentiles = statistics.quantiles(latencies_s, n=100, method="inclusive")
        return {
            "runs": options.runs,
            "changes": len(latencies_s),
            "reconcile_p50_s": round(percentiles[49], 3),
            "reconcile_p99_s": round(percentiles[98], 3),
            "rss_mb": round(here.rss_mb(), 1),
            "idle_writes_per_hour": round(idle_writes * 3600 / options.idle_seconds),
            "api_calls_per_run_create": round(calls / options.runs, 1),
            "create_seconds": round(quiet_s - started_s, 1),
        }


async def change_some(here: MeasuredOperator, options: argparse.Namespace) -> list[float]:
    """Change runs at a constant rate; return the seconds until each change was applied."""
    stopwatch = Stopwatch()
    unsubscribe = here.server.api.store.subscribe(stopwatch.see)
    for number in range(options.changes):
        name = f"run-{number % options.runs:04}"
        edit = {"spec": {"learner": {"image": f"learner:{number}"}}}
        await here.client.merge_patch(f"{RUNS}/{name}", edit)
        await asyncio.sleep(1 / options.changes_per_second)
    await here.until_quiet()
    unsubscribe()
    return stopwatch.latencies_s


def shortfalls(figures: dict[str, Any]) -> list[str]:
    """Return the bars that the figures miss."""
    p99_s, rss_mb = figures["reconcile_p99_s"], figures["rss_mb"]
    bars = {
        f"reconcile_p99_s must be at most {_P99_BAR_S:g}": p99_s <= _P99_BAR_S,
        f"rss_mb must be at most {_RSS_BAR_MB:g}": rss_mb <= _RSS_BAR_MB,
        "idle_writes_per_hour must be 0": figures["idle_writes_per_hour"] == 0,
        "every change must be applied": figures["changes"] > 0,
    }
    return [bar for bar, holds in bars.items() if not holds]


def main() -> int:
    """Measure and print."""
    parser = parser_of(
        __doc__,
        runs=500,
        poll_seconds=(30.0, "spec.control.pollSeconds"),
        idle_seconds=(75.0, "length of the rest"),
        changes=(200, "changes whose time is taken"),
        changes_per_second=4.0,
    )
    figures = asyncio.run(measure(parser.parse_args()))
    missed = shortfalls(figures)
    for bar in missed:
        print(f"missed: {bar}")
    print(json.dumps(figures))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
