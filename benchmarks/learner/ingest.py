"""Measure what a learner ingests per second of one core, and what its redo log and TLS cost.

The groups of a step are submitted a few at a time, kept by the ledger and taken as one batch.
Client and server share a process and one core, whose CPU time is counted; leases are granted
outside of it. The client is the worker's and the service the learner's, checks included; then the
same with the redo log in a temporary folder, and over TLS.

    python -m benchmarks.learner.ingest

The last line printed is JSON:

    trajectories_per_s  tokens_per_s     tokens are those of the responses
    bytes_per_token                      sent, prompts included
    redo_log_tokens_per_s                with the redo log
    redo_log_slowdown                    share of the rate that the log costs
    redo_log_answer_ms  answer_ms        median time until a submission is answered
    tls_tokens_per_s  tls_slowdown       over TLS, without the redo log
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.made import run_spec, trajectory
from benchmarks.harness.measures import parser_of
from tests.fixtures.learner.dispatcher import NoLog
from vcpo.api import VCPORunSpec
from vcpo.wire.access.tls import CertificateFolder
from vcpo.wire.client import open_channel
from vcpo.wire.server import WireServer
from vcpo.wire.trajectory import Trajectory, VersionSpan, trajectory_to_message
from vcpo.wire.v1 import work_pb2_grpc
from vcpo_learner.ledger.admission import WorkRequest
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.ledger.ledger import TrajectoryLedger
from vcpo_learner.ledger.redo_log import RedoLog
from vcpo_learner.ledger.workers import WorkerRegistry
from vcpo_learner.services.work import ResponseBounds, WorkService
from vcpo_learner.troubles import Troubles
from vcpo_operator.cluster_api.run_secrets import new_certificates
from vcpo_rollout.transport.learner_client import LearnerClient

VOCABULARY = 151_936
_PROMPT_TOKENS = 128
_WORKER, _INCARNATION = "worker", "now"
_SERVER_NAME = "learner"

Submit = Callable[[str, Sequence[Trajectory]], Awaitable[Any]]


def make_responses(count: int, mean_tokens: int) -> list[Trajectory]:
    """Return responses of up to twice `mean_tokens` tokens, in two spans, with float32 numbers.

    All respond to one prompt, as a lease requires; grouping has no effect on the time.
    """
    rng = random.Random(0)  # noqa: S311 - no secret
    prompt = tuple(rng.choices(range(VOCABULARY), k=_PROMPT_TOKENS))
    return [_response(rng, prompt, rng.randint(2, 2 * mean_tokens - 2)) for _ in range(count)]


def _response(rng: random.Random, prompt: tuple[int, ...], size: int) -> Trajectory:
    logprobs = struct.pack(f"{size}f", *(-rng.expovariate(1.0) for _ in range(size)))
    half = size // 2
    spans = [VersionSpan(policy_version=0, num_tokens=each) for each in (half, size - half)]
    tokens = rng.choices(range(VOCABULARY), k=size)
    numbers = struct.unpack(f"{size}f", logprobs)
    return trajectory("", prompt, tokens, numbers, reward=rng.random(), version_spans=tuple(spans))


def make_dispatcher(
    spec: VCPORunSpec, log: RedoLog | NoLog, incarnation: str = _INCARNATION
) -> Dispatcher:
    """Return a dispatcher with an empty ledger; log: where the ledger keeps its changes."""
    clock = time.monotonic
    ledger = TrajectoryLedger(
        prompts_per_step=spec.batch.prompts_per_step,
        trajectories_per_prompt=spec.batch.trajectories_per_prompt,
        lease_timeout_s=spec.lease.timeout_seconds,
        incarnation=incarnation,
        clock=clock,
        log=log,
    )
    return Dispatcher(
        spec=spec,
        ledger=ledger,
        registry=WorkerRegistry(clock),
        troubles=Troubles(spec, clock, lambda *_: None),
        incarnation=incarnation,
        clock=clock,
    )


def work_service(dispatcher: Dispatcher, spec: VCPORunSpec) -> WorkService:
    """Return the learner's service of a dispatcher, for tokens of a large vocabulary."""
    bounds = replace(ResponseBounds.from_spec(spec), vocabulary_size=VOCABULARY)
    return WorkService(dispatcher, spec, bounds)


@dataclass
class Rate:
    """The best step of one way."""

    cpu_s: float = math.inf
    """CPU seconds of a step in which all responses are submitted."""
    answers_s: list[float] = field(default_factory=list)
    """Seconds from each submission to its answer."""


async def measure(
    dispatcher: Dispatcher,
    submit: Submit,
    responses: Sequence[Trajectory],
    rate: Rate,
    arguments: argparse.Namespace,
) -> None:
    """Submit these responses in every step, and note the times."""
    in_flight: int = arguments.in_flight

    async def submit_group(lease_id: str, group: Sequence[Trajectory]) -> None:
        begun_s = time.perf_counter()
        await submit(lease_id, group)
        rate.answers_s.append(time.perf_counter() - begun_s)

    for _ in range(arguments.steps):
        groups = await _lease_step(dispatcher, responses)
        begun_s = time.process_time()
        for start in range(0, len(groups), in_flight):
            some = groups[start : start + in_flight]
            await asyncio.gather(*(submit_group(*each) for each in some))
        batch = await dispatcher.next_batch()
        rate.cpu_s = min(rate.cpu_s, time.process_time() - begun_s)
        assert batch is not None
        assert sum(len(group.trajectories) for group in batch) == len(responses)
        dispatcher.advance_version()


async def _lease_step(
    dispatcher: Dispatcher, responses: Sequence[Trajectory]
) -> list[tuple[str, list[Trajectory]]]:
    """Return the responses of a step with the identifiers of new leases."""
    request = WorkRequest(
        worker_id=_WORKER,
        rollout_group="main",
        incarnation=_INCARNATION,
        process_id="process",
        held_policy_version=dispatcher.policy_version,
        max_trajectories=len(responses),
    )
    version, rest, step = dispatcher.policy_version, iter(responses), []
    for lease in await dispatcher.lease(request, wait_s=0):
        names = (f"{lease.lease_id}/{number}" for number in range(lease.num_trajectories))
        step.append((lease.lease_id, [_sampled(next(rest), name, version) for name in names]))
    return step


def _sampled(one: Trajectory, name: str, version: int) -> Trajectory:
    spans = tuple(replace(each, policy_version=version) for each in one.version_spans)
    return replace(one, trajectory_id=name, version_spans=spans)


@asynccontextmanager
async def over_grpc(
    dispatcher: Dispatcher, spec: VCPORunSpec, certificates: CertificateFolder | None = None
) -> AsyncIterator[Submit]:
    """Submit with the worker's client to the learner's service; certificates: over TLS."""
    server = WireServer(keys=None)
    service = work_service(dispatcher, spec)
    work_pb2_grpc.add_WorkServiceServicer_to_server(service, server.grpc_server)
    port = await server.start("127.0.0.1:0", (), certificates=certificates)
    trust = None if certificates is None else certificates.trust(_SERVER_NAME)
    channel = open_channel(f"127.0.0.1:{port}", key=None, trust=trust)
    try:
        yield LearnerClient(channel, worker_id=_WORKER, rollout_group="main").submit
    finally:
        await channel.close()
        await server.stop(0)


async def compare(arguments: argparse.Namespace) -> dict[str, float]:
    """Measure the ways in turns; the best of each counts."""
    spec = make_spec(arguments)
    responses = make_responses(spec.batch.trajectories, arguments.tokens)
    num_tokens = sum(len(response.response_token_ids) for response in responses)
    rates = {name: Rate() for name in ("grpc", "log", "tls")}
    for _ in range(arguments.repeats):
        for name, rate in rates.items():
            with tempfile.TemporaryDirectory() as folder:
                async with way_to_submit(name, spec, Path(folder)) as (dispatcher, submit):
                    await measure(dispatcher, submit, responses, rate, arguments)
            print(f"{name}: {num_tokens / rate.cpu_s:12,.0f} tokens/s", flush=True)
    per_token = len(responses) / num_tokens
    sent_bytes = sum(trajectory_to_message(response).ByteSize() for response in responses)
    best = {name: num_tokens / rate.cpu_s for name, rate in rates.items()}
    return {
        "trajectories_per_s": round(best["grpc"] * per_token, 1),
        "tokens_per_s": round(best["grpc"]),
        "bytes_per_token": round(sent_bytes / num_tokens, 2),
        "redo_log_tokens_per_s": round(best["log"]),
        "redo_log_slowdown": round(1 - best["log"] / best["grpc"], 3),
        "answer_ms": round(1000 * median(rates["grpc"].answers_s), 2),
        "redo_log_answer_ms": round(1000 * median(rates["log"].answers_s), 2),
        "tls_tokens_per_s": round(best["tls"]),
        "tls_slowdown": round(1 - best["tls"] / best["grpc"], 3),
    }


@asynccontextmanager
async def way_to_submit(
    name: str, spec: VCPORunSpec, folder: Path
) -> AsyncIterator[tuple[Dispatcher, Submit]]:
    """Yield a new dispatcher, and what submits to it.

    name: grpc, log or tls.
    folder: for the files of that way.
    """
    with contextlib.ExitStack() as closing:
        log = RedoLog(folder, lambda *_: None) if name == "log" else NoLog()
        if isinstance(log, RedoLog):
            closing.callback(log.close)
        dispatcher = make_dispatcher(spec, log)
        certificates = _certificates(folder) if name == "tls" else None
        async with over_grpc(dispatcher, spec, certificates) as submit:
            yield dispatcher, submit


def _certificates(folder: Path) -> CertificateFolder:
    """Certificates as the operator makes them."""
    data = new_certificates("ingest", {"tls": [_SERVER_NAME]}, now_s=time.time())
    for name in ("ca.crt", "tls.crt", "tls.key"):
        (folder / name).write_bytes(data[name])
    return CertificateFolder(folder)


def make_spec(arguments: argparse.Namespace) -> VCPORunSpec:
    """Return a run in which nothing waits and nothing is too old."""
    return run_spec(
        batch={"promptsPerStep": arguments.prompts, "trajectoriesPerPrompt": arguments.group},
        algorithm={"maxPolicyLagSteps": 1000},
        sampling={"maxNewTokens": 65_536},
        rollouts=[{"name": "main", "maxConcurrentSequences": 4096}],
    )


def main() -> None:
    """Measure on one core and print JSON."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    parser = parser_of(
        __doc__,
        prompts=(16, "prompts of a step"),
        group=(8, "responses to each"),
        tokens=(1024, "mean length of a response"),
        steps=(5, "steps of one measurement"),
        in_flight=(4, "groups submitted at a time"),
        repeats=(3, "measurements of each way"),
    )
    print(json.dumps(asyncio.run(compare(parser.parse_args()))))


if __name__ == "__main__":
    main()
