"""What serving workers takes from the thread that steps, in one process.

One thread takes steps with exact norms as `benchmarks.learner.host_syncs` does, all of which are
the host's: the worst case. Another is the learner of `benchmarks.soak`. Workers submit responses at
a rate, wait for work and hear of each version. Rates and quiet take turns.

    python -m benchmarks.learner.serving_share

The last line printed is JSON. By tokens of responses per second, 0 for a learner without workers:

    blocked_share    share of a step in which the thread that steps neither ran nor stood in line
                     for a core: it waited for the interpreter. Threads that lose their core while
                     they hold it count too
    serving_share    CPU seconds of the thread that serves, in a second
    step_s           wall-clock seconds of a step, the median
    step_cpu_s       CPU seconds of the thread that steps, in a step
    tokens_per_s     that were accepted
"""

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.harness.made import run_spec
from benchmarks.harness.measures import parser_of
from benchmarks.learner.host_syncs import Side, gpu_branches
from benchmarks.learner.ingest import make_responses
from benchmarks.soak import Learner, Stream, learner_process, make_streams
from vcpo.api import VCPORunSpec

_GROUP, _TOKENS = 8, 1600
"""Responses of a group, and the mean of their tokens."""
_LEASE_WAIT_S = 10.0
_SETTLING_S = 2.0


def make_spec(workers: int) -> VCPORunSpec:
    """Return a run whose lag limit lets every worker hold a group and wait for nobody."""
    group = {"name": "main", "maxReplicas": workers, "maxConcurrentSequences": _GROUP}
    return run_spec(
        batch={"promptsPerStep": 16, "trajectoriesPerPrompt": _GROUP},
        algorithm={"maxPolicyLagSteps": 8 + workers // 8},
        sampling={"maxNewTokens": 2 * _TOKENS},
        rollouts=[group],
    )


class Step(NamedTuple):
    """Seconds of a step."""

    wall_s: float
    cpu_s: float
    queued_s: float
    """In which the thread could run and had no core."""

    @property
    def blocked_s(self) -> float:
        return self.wall_s - self.cpu_s - self.queued_s


class Stepping:
    """Takes steps in a thread of its own until it is stopped."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        with gpu_branches(counted=False):
            self._side = Side("opob", num_layers=28, response_tokens=48)
        self._steps: list[Step] = []
        threading.Thread(target=self._run, daemon=True).start()

    def take(self) -> list[Step]:
        found, self._steps = self._steps, []
        return found

    def _run(self) -> None:
        with gpu_branches(counted=False):
            while True:
                started_s, (used_s, queued_s) = time.perf_counter(), _scheduled_s()
                self._side.step()
                now_s, (later_used_s, later_queued_s) = time.perf_counter(), _scheduled_s()
                self._steps.append(
                    Step(now_s - started_s, later_used_s - used_s, later_queued_s - queued_s)
                )


def _scheduled_s() -> tuple[float, float]:
    ran, waited = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[:2]
    return int(ran) / 1e9, int(waited) / 1e9


def _serve(connection: Connection, run_dir: Path, spec: VCPORunSpec) -> None:
    """Be the learner's process: send the port, and after each message what was measured since."""

    async def serve() -> None:
        stepping = Stepping()
        learner = Learner(spec, run_dir)
        connection.send(await learner.server.start("127.0.0.1:0", ()))
        training = asyncio.create_task(learner.train())
        loop = asyncio.get_running_loop()
        while True:
            started_s, used_s = time.perf_counter(), time.thread_time()
            await loop.run_in_executor(None, connection.recv)
            if training.done():
                await training
            share = (time.thread_time() - used_s) / (time.perf_counter() - started_s)
            connection.send((share, stepping.take()))

    asyncio.run(serve())


@dataclass(slots=True)
class PacedStream(Stream):
    """A worker that submits a group every so many seconds."""

    interval_s: float = 1.0
    first_s: float = 0.0
    """After the start, when the first group is due."""

    async def _generate(self, begun_s: float, duration_s: float) -> None:
        due_s = begun_s + self.first_s - self.interval_s
        while True:
            held = self.held
            assert held is not None
            result = await self.client.lease(
                held=held, max_trajectories=_GROUP, wait_s=_LEASE_WAIT_S
            )
            if not result.leases:
                await asyncio.sleep(result.retry_after_s)
            for lease in result.leases:
                due_s += self.interval_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                await self._submit(lease, held)
                self.accepted[0] += lease.num_trajectories


@dataclass(slots=True)
class Found:
    """What the phases at one rate showed."""

    shares: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    """That the learner accepted."""


async def measure(
    rates: list[int], *, workers: int, seconds: float, turns: int
) -> dict[int, Found]:
    """Let the rates take turns with one learner; return what each showed."""
    found: defaultdict[int, Found] = defaultdict(Found)
    with learner_process(_serve, make_spec(workers)) as (_, ours):
        port: int = await asyncio.to_thread(ours.recv)
        for rate in rates * turns:
            async with _streams(port, workers if rate else 0, rate) as streams:
                await asyncio.sleep(_SETTLING_S)
                await _asked(ours)
                before, started_s = _accepted(streams), time.monotonic()
                await asyncio.sleep(seconds)
                share, steps = await _asked(ours)
                per_s = (_accepted(streams) - before) / (time.monotonic() - started_s)
            one = found[rate]
            one.shares.append(share)
            one.steps += steps
            one.tokens_per_s.append(_TOKENS * per_s)
            print(f"{rate:9,} tokens/s: {len(steps)} steps, share {share:.4f}", flush=True)
    return found


def _accepted(streams: Sequence[PacedStream]) -> int:
    return sum(sum(each.accepted) for each in streams)


async def _asked(connection: Connection) -> tuple[float, list[Step]]:
    connection.send(None)
    answer: tuple[float, list[Step]] = await asyncio.to_thread(connection.recv)
    return answer


@contextlib.asynccontextmanager
async def _streams(port: int, workers: int, rate: int) -> AsyncIterator[list[PacedStream]]:
    """Let workers submit so many tokens a second together, until the block ends."""
    responses = make_responses(_GROUP, _TOKENS)
    group_tokens = sum(len(each.response_token_ids) for each in responses)
    async with contextlib.AsyncExitStack() as stack:
        streams = await make_streams(stack, port, workers, responses, PacedStream)
        for number, each in enumerate(streams):
            each.interval_s = workers * group_tokens / max(rate, 1)
            each.first_s = number * group_tokens / max(rate, 1)
        running = asyncio.gather(*(each.run(time.monotonic(), 1.0) for each in streams))
        try:
            yield streams
            if streams and running.done():
                await running  # raises why a stream ended
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def report(found: dict[int, Found]) -> dict[str, object]:
    """Return the line that is printed."""
    line: dict[str, object] = {"benchmark": "serving_share"}
    for rate, one in found.items():
        step_s = median(step.wall_s for step in one.steps)
        blocked_s = median(step.blocked_s for step in one.steps)
        line[str(rate)] = {
            "blocked_share": round(blocked_s / step_s, 3),
            "serving_share": round(median(one.shares), 4),
            "step_s": round(step_s, 3),
            "step_cpu_s": round(median(step.cpu_s for step in one.steps), 3),
            "tokens_per_s": round(median(one.tokens_per_s)),
        }
    return line


def main() -> None:
    """Measure and print."""
    options = parser_of(
        __doc__,
        rates=[35_000, 280_000],
        workers=64,
        seconds=(15.0, "of a turn, longer than a step"),
        turns=3,
    ).parse_args()
    rates = [0, *options.rates]
    found = asyncio.run(
        measure(rates, workers=options.workers, seconds=options.seconds, turns=options.turns)
    )
    sys.stdout.write(json.dumps(report(found)) + "\n")


if __name__ == "__main__":
    main()
