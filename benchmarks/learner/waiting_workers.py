"""What workers cost a learner that wait for work, and that hear of a new version.

The learner's process is that of `benchmarks.soak`: real services, ledger and redo log, no model.
All workers but one do what a worker's process does while nothing is admissible: they wait for work
and for a version, and ask again when a call ends without any. They have delivered before, and now
have room for less than a group, so they get none. Then the last one submits a few groups, and after
each all hear of a new version and ask for work again. They fetch no weights.

    python -m benchmarks.learner.waiting_workers

The last line printed is JSON, in CPU time of the learner's process:

    waiting_us_per_s        microseconds for each worker and second of waiting, above those of a
                            learner whose workers are connected and silent
    version_us_per_worker   microseconds for each worker and version
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.learner.ingest import make_responses
from benchmarks.soak import learner_process, own_channel, take_core
from vcpo.api import VCPORun, VCPORunSpec
from vcpo.wire.trajectory import VersionSpan
from vcpo.wire.v1 import work_pb2
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient

_GROUP, _TOKENS = 2, 2
_LEASE_WAIT_S, _VERSION_WAIT_S = 5.0, 10.0
_SETTLING_S = 2.0


def make_spec(workers: int) -> VCPORunSpec:
    """Return a run in which each step has one group."""
    spec = {
        "model": {"name": "none"},
        "environment": {"name": "countdown"},
        "steps": 1_000_000,
        "batch": {"promptsPerStep": 1, "trajectoriesPerPrompt": _GROUP},
        "algorithm": {"maxPolicyLagSteps": 1},
        "rollouts": [{"name": "main", "maxReplicas": workers, "maxConcurrentSequences": _GROUP}],
    }
    return VCPORun.model_validate({"metadata": {"name": "waiting"}, "spec": spec}).spec


class Caller:
    """The calls of one worker."""

    def __init__(self, client: LearnerClient) -> None:
        self.held: HeldPolicy | None = None
        self._client = client
        self._changed = asyncio.Event()

    async def hear(self) -> HeldPolicy:
        """Wait for a version that is not held, or for the end of the call; hold and return it."""
        manifest = await self._client.newest_policy(self.held, wait_s=_VERSION_WAIT_S)
        self.held = HeldPolicy.from_manifest(manifest)
        self._changed.set()
        return self.held

    async def deliver(self) -> None:
        """Lease a group and submit it."""
        lease, held = await self._lease()
        span = VersionSpan(policy_version=held.policy_version, num_tokens=_TOKENS)
        responses = [
            replace(one, trajectory_id=f"{lease.lease_id}/{number}", version_spans=(span,))
            for number, one in enumerate(make_responses(_GROUP, _TOKENS))
        ]
        await self._client.submit(lease.lease_id, responses)

    async def wait(self) -> None:
        """Wait for work that never comes, and for versions, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear_for_ever())
            tasks.create_task(self._ask_for_ever())

    async def _lease(self) -> tuple[work_pb2.Lease, HeldPolicy]:
        while True:
            held = self.held or await self.hear()
            result = await self._client.lease(
                held=held, max_trajectories=_GROUP, wait_s=_LEASE_WAIT_S
            )
            if result.leases:
                return result.leases[0], held
            await self.hear()

    async def _hear_for_ever(self) -> None:
        while True:
            await self.hear()

    async def _ask_for_ever(self) -> None:
        while True:
            held = self.held or await self.hear()
            self._changed.clear()
            result = await self._client.lease(held=held, max_trajectories=1, wait_s=_LEASE_WAIT_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(result.retry_after_s):
                    await self._changed.wait()


async def measure(workers: int, *, seconds: float, versions: int, core: int) -> dict[str, float]:
    """Measure a learner that has a core."""
    with learner_process(make_spec(workers + 1), core) as (pid, port):
        async with contextlib.AsyncExitStack() as stack:
            callers = [
                Caller(
                    LearnerClient(
                        await stack.enter_async_context(own_channel(port)),
                        worker_id=f"worker-{number}",
                        rollout_group="main",
                    )
                )
                for number in range(workers + 1)
            ]
            for caller in callers:
                await caller.deliver()
            busy, *waiting = callers
            idle = await _busy_share(pid, seconds)
            running = asyncio.gather(*(caller.wait() for caller in waiting))
            await asyncio.sleep(_SETTLING_S)
            waited = await _busy_share(pid, seconds)
            before_s = _used_s(pid)
            for _ in range(versions):
                await _publish(busy, waiting)
            published_s = _used_s(pid) - before_s
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
    return {
        "waiting_us_per_s": round(1e6 * (waited - idle) / workers, 1),
        "version_us_per_worker": round(1e6 * published_s / versions / workers, 1),
        "workers": workers,
    }


async def _publish(busy: Caller, waiting: Sequence[Caller]) -> None:
    """Deliver a group, and wait until all have heard of the version after it."""
    before = {caller: caller.held for caller in waiting}
    await busy.deliver()
    while any(caller.held == held for caller, held in before.items()):
        await asyncio.sleep(0.01)


async def _busy_share(pid: int, seconds: float) -> float:
    """Return the CPU seconds that a process uses in a second."""
    used_s, started_s = _used_s(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (_used_s(pid) - used_s) / (time.monotonic() - started_s)


def _used_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0, help="with and without waiting")
    parser.add_argument("--versions", type=int, default=10)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    take_core(cores[-1])
    found = asyncio.run(
        measure(options.workers, seconds=options.seconds, versions=options.versions, core=cores[0])
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
