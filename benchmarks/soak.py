"""Measure whether a learner serves a thousand workers for long: memory, fairness, throughput.

The learner's process has its real dispatcher, ledger, redo log, policy store and services, and a
loop that consumes each batch and publishes a version, without a model. Every stream is a worker
with a connection of its own, which needs no time to generate. A host polls the signals. The learner
has one core, and all streams share another one.

First ten workers run for a tenth of the time, at least 30 s, then all of them with a new learner.

    python -m benchmarks.soak                              1,000 workers, ten minutes
    python -m benchmarks.soak --minutes 1 --workers 200

The last line printed is JSON:

    rss_growth                      the learner's memory in the last tenth over that in the second
    starved                         workers without an accepted response in a tenth after the first
    throughput_ratio_vs_10_workers  of the trajectories accepted per second, after the first tenth
    trajectories_per_s  steps  rss_mb  workers

Exit status 1 when a bar is missed: growth of 1.05, nobody starved, a ratio of 0.8.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import grpc
import torch
from safetensors.torch import save

from benchmarks.harness.made import run_spec
from benchmarks.harness.measures import parser_of, resident_bytes
from benchmarks.learner.ingest import make_dispatcher, make_responses, work_service
from tests.fixtures.weight_changes import prepare
from vcpo.api import VCPORunSpec
from vcpo.metrics import RolloutMetrics
from vcpo.wire.deltas import chain_to
from vcpo.wire.limits import CALL_TIMEOUT_S, CHANNEL_OPTIONS
from vcpo.wire.server import WireServer
from vcpo.wire.trajectory import Trajectory, VersionSpan
from vcpo.wire.v1 import control_pb2, control_pb2_grpc, policy_pb2_grpc, work_pb2, work_pb2_grpc
from vcpo.wire.weights import delta_name, full_set_name
from vcpo_learner.ledger.redo_log import RedoLog
from vcpo_learner.services.work import ControlService, PolicyService
from vcpo_learner.telemetry.signals import SignalWindow
from vcpo_learner.weights.store import PolicyStore, VersionFolder
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient
from vcpo_rollout.transport.weight_files import ArrivingFile, RetiredVersionError, WeightFiles

_TENTHS = 10
_BASELINE_WORKERS = 10
_LEASE_WAIT_S, _POLL_S, _PROGRESS_S = 10.0, 2.0, 15.0
_GROUP, _TOKENS = 8, 64
_GROUPS_OF_A_WORKER = 6
_PARAMETERS = 1 << 16
_LEAST_S = 30.0
_GROWTH_BAR, _RATIO_BAR = 1.05, 0.8


def make_spec(workers: int) -> VCPORunSpec:
    """Return a run whose lag limit lets every worker hold a group and wait for nobody."""
    group = {"name": "main", "maxReplicas": workers, "maxConcurrentSequences": 2 * _GROUP}
    prompts = _GROUPS_OF_A_WORKER * workers
    return run_spec(
        batch={"promptsPerStep": prompts, "trajectoriesPerPrompt": _GROUP},
        algorithm={"maxPolicyLagSteps": 1},
        sampling={"maxNewTokens": 2 * _TOKENS},
        rollouts=[group],
    )


class Learner:
    """A learner without a model. Owner: the event loop of its process."""

    def __init__(self, spec: VCPORunSpec, run_dir: Path) -> None:
        incarnation = uuid.uuid4().hex[:8]
        self._log = RedoLog(run_dir, lambda *_: None)
        self.dispatcher = make_dispatcher(spec, self._log, incarnation)
        folder = VersionFolder(str(run_dir / "store"), incarnation, 0, is_temporary=False)
        self._policies = PolicyStore(folder, incarnation=incarnation, clock=time.monotonic)
        signals = SignalWindow(
            batch_trajectories=spec.batch.trajectories,
            dispatcher=self.dispatcher,
            clock=time.monotonic,
        )
        self.server = WireServer(keys=None)
        grpc_server = self.server.grpc_server
        work = work_service(self.dispatcher, spec)
        work_pb2_grpc.add_WorkServiceServicer_to_server(work, grpc_server)
        policies = PolicyService(self._policies, self.dispatcher)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(policies, grpc_server)
        control = ControlService(
            dispatcher=self.dispatcher,
            signals=signals,
            drain=lambda _: None,
            event=lambda _, __: None,
        )
        control_pb2_grpc.add_ControlServiceServicer_to_server(control, grpc_server)

    async def train(self) -> None:
        """Consume batches and publish versions until cancelled; a hundredth of each differs."""
        weights = torch.zeros(_PARAMETERS)
        while True:
            version = self.dispatcher.policy_version
            weights[version % 100 :: 100] += 1.0
            payload = save({"weight": weights})
            self._policies.publish(prepare(self._policies, version, payload))
            self.dispatcher.notify()
            batch = await self.dispatcher.next_batch()
            assert batch is not None
            ledger = self.dispatcher.ledger
            ledger.counts().check()
            ledger.snapshot()
            self._log.remove_before(version + 1)
            self.dispatcher.advance_version()


def _serve(connection: Connection, run_dir: Path, spec: VCPORunSpec, core: int) -> None:
    """Be the learner's process: send the port, and serve until it is terminated."""
    take_core(core)

    async def serve() -> None:
        learner = Learner(spec, run_dir)
        connection.send(await learner.server.start("127.0.0.1:0", ()))
        await learner.train()

    asyncio.run(serve())


@contextmanager
def learner_process(
    serve: Callable[..., None], *arguments: object
) -> Iterator[tuple[int, Connection]]:
    """Run `serve` in a process with a connection and a run directory; yield its id and our end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as run_dir:
        given = (theirs, Path(run_dir), *arguments)
        process = context.Process(target=serve, args=given, daemon=True)
        process.start()
        try:
            yield process.pid or 0, ours
        finally:
            process.terminate()
            process.join()


_Stream = TypeVar("_Stream", bound="Stream")


@dataclass(slots=True)
class Stream:
    """One worker, and when its responses were accepted."""

    client: LearnerClient
    files: WeightFiles
    responses: list[Trajectory]
    held: HeldPolicy | None = None
    accepted: list[int] = field(default_factory=lambda: [0] * _TENTHS)
    """Trajectories in each tenth of the time."""

    async def run(self, begun_s: float, duration_s: float) -> None:
        """Be a worker until cancelled."""
        self.held = await self._fetch(None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._update())
            tasks.create_task(self._generate(begun_s, duration_s))

    async def _update(self) -> None:
        while True:
            self.held = await self._fetch(self.held)

    async def _generate(self, begun_s: float, duration_s: float) -> None:
        """Lease and submit; what is submitted was sampled by the version held at the lease."""
        while True:
            held = self.held
            assert held is not None
            result = await self.client.lease(
                held=held, max_trajectories=2 * _GROUP, wait_s=_LEASE_WAIT_S
            )
            if not result.leases:
                await asyncio.sleep(result.retry_after_s)
            for lease in result.leases:
                accepted = await self._submit(lease, held)
                tenth = int(_TENTHS * (time.monotonic() - begun_s) / duration_s)
                self.accepted[min(tenth, _TENTHS - 1)] += accepted

    async def _submit(self, lease: work_pb2.Lease, held: HeldPolicy) -> int:
        """Submit the responses that a lease asks for; return how many were accepted."""
        some = self.responses[: lease.num_trajectories]
        spans = [
            VersionSpan(policy_version=held.policy_version, num_tokens=len(each.response_token_ids))
            for each in some
        ]
        responses = [
            replace(each, trajectory_id=f"{lease.lease_id}/{number}", version_spans=(span,))
            for number, (each, span) in enumerate(zip(some, spans, strict=True))
        ]
        return await self.client.submit(lease.lease_id, responses)

    async def _fetch(self, held: HeldPolicy | None) -> HeldPolicy:
        """Receive the newest version, as deltas where the learner offers them."""
        manifest = await self.client.newest_policy(held, wait_s=_LEASE_WAIT_S)
        is_whole, deltas = chain_to(manifest, None if held is None else held.policy_version)
        wanted = [(delta_name(each), each.total_bytes) for each in deltas]
        if is_whole:
            wanted.append((full_set_name(manifest.full_set_version), manifest.total_bytes))
        files = [ArrivingFile(name=name, total_bytes=size) for name, size in wanted]
        try:
            await self.files.read(manifest, files)
        except RetiredVersionError:
            return await self._fetch(held)
        return HeldPolicy.from_manifest(manifest)


async def make_streams(
    stack: contextlib.AsyncExitStack,
    port: int,
    workers: int,
    responses: list[Trajectory],
    kind: type[_Stream],
) -> list[_Stream]:
    """Return workers of a learner, each with a connection of its own until the stack ends."""
    gauges = RolloutGauges(RolloutMetrics(run="soak", group="main"))
    channels = [await stack.enter_async_context(own_channel(port)) for _ in range(workers)]
    clients = [
        LearnerClient(channel, worker_id=f"worker-{number}", rollout_group="main")
        for number, channel in enumerate(channels)
    ]
    return [kind(each, WeightFiles(f"127.0.0.1:{port}", gauges), responses) for each in clients]


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What one learner did for its workers."""

    trajectories_per_s: float
    starved: int
    rss_mb: list[float]
    """At the end of each tenth of the time."""
    steps: int


async def soak(workers: int, duration_s: float, *, most_workers: int, core: int) -> Soaked:
    """Let so many workers run for a while with a new learner, which has a core."""
    responses = make_responses(_GROUP, _TOKENS)
    with learner_process(_serve, make_spec(most_workers), core) as (pid, connection):
        port: int = connection.recv()
        async with contextlib.AsyncExitStack() as stack:
            streams = await make_streams(stack, port, workers, responses, Stream)
            control = control_pb2_grpc.ControlServiceStub(
                await stack.enter_async_context(own_channel(port))
            )
            begun_s = time.monotonic()
            running = asyncio.gather(*(each.run(begun_s, duration_s) for each in streams))
            polling = asyncio.create_task(_poll(control, begun_s))
            rss_mb: list[float] = []
            for _ in range(_TENTHS):
                await asyncio.wait({running}, timeout=duration_s / _TENTHS)
                if running.done():
                    await running  # raises why a stream ended
                rss_mb.append(resident_bytes(pid) / 2**20)
            signals = await _signals(control)
            for task in (running, polling):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
    later_s = duration_s * (_TENTHS - 1) / _TENTHS
    return Soaked(
        trajectories_per_s=sum(sum(each.accepted[1:]) for each in streams) / later_s,
        starved=sum(not all(each.accepted[1:]) for each in streams),
        rss_mb=rss_mb,
        steps=signals.policy_version,
    )


async def _poll(control: control_pb2_grpc.ControlServiceStub, begun_s: float) -> None:
    """Poll the signals as a host does, and print the progress, until cancelled."""
    told_s = begun_s
    while True:
        signals = await _signals(control)
        if (now_s := time.monotonic()) - told_s >= _PROGRESS_S:
            told_s = now_s
            print(
                f"{now_s - begun_s:5.0f} s: step {signals.policy_version},"
                f" {len(signals.workers)} workers,"
                f" {signals.consumed_per_s:.0f} trajectories/s",
                flush=True,
            )
        await asyncio.sleep(_POLL_S)


async def _signals(control: control_pb2_grpc.ControlServiceStub) -> control_pb2.Signals:
    return await control.GetSignals(control_pb2.GetSignalsRequest(), timeout=CALL_TIMEOUT_S)


def own_channel(port: int) -> grpc.aio.Channel:
    """Return a channel with a connection of its own, as a worker's process has."""
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)


def take_core(core: int) -> None:
    """Put this process on a core, and let it open as many files as it may."""
    os.sched_setaffinity(0, {core})
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def compare(workers: int, minutes: float) -> dict[str, float]:
    """Soak a learner with ten workers and one with all of them; return the report."""
    cores, duration_s = sorted(os.sched_getaffinity(0)), 60.0 * minutes
    take_core(cores[-1])
    short_s = max(_LEAST_S, duration_s / _TENTHS)
    few = asyncio.run(soak(_BASELINE_WORKERS, short_s, most_workers=workers, core=cores[0]))
    print(f"{_BASELINE_WORKERS} workers: {few.trajectories_per_s:.0f} trajectories/s", flush=True)
    many = asyncio.run(soak(workers, duration_s, most_workers=workers, core=cores[0]))
    return {
        "rss_growth": round(many.rss_mb[-1] / many.rss_mb[1], 3),
        "starved": many.starved,
        "throughput_ratio_vs_10_workers": round(
            many.trajectories_per_s / few.trajectories_per_s, 3
        ),
        "trajectories_per_s": round(many.trajectories_per_s, 1),
        "steps": many.steps,
        "rss_mb": round(many.rss_mb[-1], 1),
        "workers": workers,
    }


def main() -> None:
    """Soak, print progress and the JSON line."""
    parser = parser_of(__doc__, workers=1000, minutes=10.0)
    options = parser.parse_args()
    if options.minutes <= 0 or options.workers < 1:
        parser.error("give minutes above 0 and at least one worker")
    report = compare(options.workers, options.minutes)
    print(json.dumps(report))
    is_met = report["rss_growth"] <= _GROWTH_BAR and report["starved"] == 0
    if not is_met or report["throughput_ratio_vs_10_workers"] < _RATIO_BAR:
        sys.exit(1)


if __name__ == "__main__":
    main()
