"""What it costs leases, and the process that sends weights, that workers fetch a version.

The learner serves leases; a process of its own serves a version of random bytes in memory. Some
workers, each a process of its own, fetch it several times over; another process asks for leases all
the time, one call after another, and gets none.

    python -m benchmarks.learner.sending_weights

The last line printed is JSON:

    server_cpu_s_per_gb   CPU seconds of the process that sends, per gigabyte (10^9 bytes) fetched
    worker_cpu_s_per_gb   the same of the processes that fetch
    loop_cpu_s_per_gb     the same of the learner's process, without what the leases of that time
                          cost when nothing else happens
    leases_per_s          calls for leases that were answered while the version was fetched
    lease_p50_ms, lease_p99_ms      how long they took
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy

from vcpo.api import VCPORun, VCPORunSpec
from vcpo.metrics import RolloutMetrics
from vcpo.wire.client import open_channel
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import policy_pb2_grpc, work_pb2, work_pb2_grpc
from vcpo.wire.weights import full_set_name
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.ledger.trajectory_ledger import TrajectoryLedger
from vcpo_learner.ledger.worker_registry import WorkerRegistry
from vcpo_learner.prompts.selection import prompt_source
from vcpo_learner.services.callers import Callers
from vcpo_learner.services.work import PolicyService, WorkService
from vcpo_learner.weight_server.process import WeightServer
from vcpo_learner.weights.store import PolicyStore
from vcpo_learner.weights.version_folder import VersionFolder
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.learner_client import LearnerClient
from vcpo_rollout.transport.weight_files import ArrivingFile, WeightFiles

_ANY_PORT = "127.0.0.1:0"
_CALL_S = 60.0
_QUIET_S = 3.0
"""Time in which leases are asked for and nothing is fetched."""


def make_spec() -> VCPORunSpec:
    """Return a run whose groups have two trajectories, so that one place gets no lease."""
    spec = {
        "model": {"name": "none"},
        "environment": {"name": "countdown"},
        "steps": 1,
        "batch": {"promptsPerStep": 1, "trajectoriesPerPrompt": 2},
        "rollouts": [{"name": "main"}],
    }
    return VCPORun.model_validate({"metadata": {"name": "sending"}, "spec": spec}).spec


def make_dispatcher(spec: VCPORunSpec) -> Dispatcher:
    """Return a dispatcher of the run."""
    ledger = TrajectoryLedger(
        prompts_per_step=1,
        trajectories_per_prompt=2,
        lease_timeout_s=spec.lease.timeout_seconds,
        max_attempts=spec.lease.max_attempts,
        prompt_source=prompt_source(spec),
        incarnation="now",
        clock=time.monotonic,
    )
    return Dispatcher(
        spec=spec,
        ledger=ledger,
        registry=WorkerRegistry(time.monotonic),
        incarnation="now",
        clock=time.monotonic,
    )


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Serve leases and a version to all workers; return the figures."""
    spec = make_spec()
    dispatcher = make_dispatcher(spec)
    versions = VersionFolder(str(folder), "now", 0, is_temporary=True)
    store = PolicyStore(versions, incarnation="now", clock=time.monotonic)
    bits = np.random.default_rng(0).integers(0, 256, options.megabytes * 10**6, dtype=np.uint8)
    policy = store.prepare(0, bytearray(safetensors.numpy.save({"weight": bits})))
    server = WeightServer(folder, _ANY_PORT)
    server.start()
    policy.manifest.address = await server.address()
    policy.manifest.folder = "/of another machine"
    store.publish(policy)
    wire = WireServer(keys=None)
    policies = PolicyService(store, WorkerRegistry(time.monotonic), Callers(dispatcher))
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(policies, wire.grpc_server)
    work_pb2_grpc.add_WorkServiceServicer_to_server(WorkService(dispatcher, spec), wire.grpc_server)
    port = await wire.start(_ANY_PORT, ())
    leasing = await _start("lease", port, 0, options)
    assert leasing.stdin is not None
    fetching = [await _start("fetch", port, number, options) for number in range(options.workers)]
    for each in (leasing, *fetching):
        assert each.stdout is not None
        await each.stdout.readline()  # it has connected
    quiet_cpu_s, quiet_s = time.process_time(), time.monotonic()
    leasing.stdin.write(b"\n")
    await asyncio.sleep(_QUIET_S)
    started_cpu_s, started_s = time.process_time(), time.monotonic()
    process_ids = [server.process_id, *(each.pid for each in fetching)]
    sent_cpu_s = _cpu_seconds(process_ids[:1])
    for each in fetching:
        assert each.stdin is not None
        each.stdin.write(b"\n")
    fetched = [json.loads(await each.stdout.readline()) for each in fetching if each.stdout]
    sent_cpu_s = _cpu_seconds(process_ids[:1]) - sent_cpu_s
    await asyncio.gather(*(each.wait() for each in fetching))
    cpu_s, seconds = time.process_time() - started_cpu_s, time.monotonic() - started_s
    leasing.stdin.close()
    assert leasing.stdout is not None
    calls = json.loads(await leasing.stdout.readline())
    before = sum(quiet_s < at_s < started_s for at_s, _ in calls)
    lease_s = sorted(each_s for at_s, each_s in calls if started_s < at_s < started_s + seconds)
    cpu_s -= len(lease_s) * (started_cpu_s - quiet_cpu_s) / before
    await leasing.wait()
    await server.close(0.0)
    await wire.stop(0.0)
    gigabytes = options.workers * options.rounds * len(bits) / 1e9
    return {
        "server_cpu_s_per_gb": sent_cpu_s / gigabytes,
        "worker_cpu_s_per_gb": sum(fetched) / gigabytes,
        "loop_cpu_s_per_gb": cpu_s / gigabytes,
        "leases_per_s": len(lease_s) / seconds,
        "lease_p50_ms": 1e3 * statistics.median(lease_s),
        "lease_p99_ms": 1e3 * lease_s[int(0.99 * (len(lease_s) - 1))],
    }


def _cpu_seconds(process_ids: Sequence[int | None]) -> float:
    """Return the CPU seconds of processes since their starts."""
    ticks = 0
    for process_id in process_ids:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def _start(
    role: str, port: int, number: int, options: argparse.Namespace
) -> asyncio.subprocess.Process:
    """Start a caller."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.learner.sending_weights", f"--rounds={options.rounds}"),
        *(f"--role={role}", f"--port={port}", f"--number={number}"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


async def fetch(port: int, number: int, rounds: int) -> None:
    """Fetch the version `rounds` times, as a worker that holds nothing; print the CPU seconds."""
    learner = f"127.0.0.1:{port}"
    files = WeightFiles(learner, RolloutGauges(RolloutMetrics(run="sending", group="main")))
    async with open_channel(learner, key=None) as channel:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        started_cpu_s = time.process_time()
        for fetched in range(rounds):
            client = LearnerClient(channel, worker_id=f"{number}-{fetched}", rollout_group="main")
            manifest = await client.newest_policy(None, wait_s=0.0)
            name = full_set_name(manifest.full_set_version)
            whole = ArrivingFile(name=name, total_bytes=manifest.total_bytes)
            await files.read(manifest, [whole])
    print(time.process_time() - started_cpu_s, flush=True)


async def lease(port: int) -> None:
    """Ask for leases until standard input ends; print when each began, and its seconds."""
    channel = open_channel(f"127.0.0.1:{port}", key=None)
    stub = work_pb2_grpc.WorkServiceStub(channel)
    request = work_pb2.LeaseRequest(
        worker_id="leases", rollout_group="main", incarnation="now", max_trajectories=1
    )
    await stub.Lease(request, timeout=_CALL_S)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    calls = []
    while not ended.done():
        started_s = time.monotonic()
        await stub.Lease(request, timeout=_CALL_S)
        calls.append((started_s, time.monotonic() - started_s))
        await asyncio.sleep(0.002)
    await channel.close()
    print(json.dumps(calls), flush=True)


def main() -> None:
    """Print the figures of both ways, and JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the version")
    parser.add_argument("--workers", type=int, default=2, help="that fetch at the same time")
    parser.add_argument("--rounds", type=int, default=5, help="fetches of each worker")
    parser.add_argument("--role", choices=["fetch", "lease"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "fetch":
        asyncio.run(fetch(options.port, options.number, options.rounds))
        return
    if options.role == "lease":
        asyncio.run(lease(options.port))
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    print(json.dumps({name: float(f"{each:.3g}") for name, each in figures.items()}))


if __name__ == "__main__":
    main()
