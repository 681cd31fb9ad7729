"""A learner to talk to over a real channel, and stand-ins for what a worker works with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import safetensors.torch
import torch

from tests.unit.learner.scenes import INCARNATION, Desk, ManualClock, make_desk, make_run
from vcpo.metrics import RolloutMetrics
from vcpo.spec import VCPORunSpec
from vcpo.wire.client import open_channel
from vcpo.wire.phase import RunPhase
from vcpo.wire.server import WireServer
from vcpo.wire.trajectory import FinishReason, PartialResponse, VersionSpan
from vcpo.wire.v1 import policy_pb2_grpc, work_pb2_grpc
from vcpo.wire.weights import manifest_of
from vcpo_learner.services.policy import PolicyService
from vcpo_learner.services.work import WorkService
from vcpo_learner.weights.peer_assignment import PeerAssignment
from vcpo_learner.weights.store import PolicyStore
from vcpo_rollout.engines.engine import (
    EngineError,
    Generation,
    GenerationCutError,
    GenerationRequest,
    PolicyWeights,
)
from vcpo_rollout.environments.environment import Prompt, Split
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.generation.environment_pool import ForeignThreads
from vcpo_rollout.generation.worker import Worker, WorkerParts
from vcpo_rollout.transport.learner_client import Learner
from vcpo_rollout.transport.retries import Retries
from vcpo_rollout.weights.receiver import WeightReceiver

PATIENCE_S = 4.0
THREADS = ForeignThreads(4)
"""For the environments of tests without a worker."""


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what another task or the other end of a channel will do."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


def weights_payload(value: float) -> bytes:
    return safetensors.torch.save({"weight": torch.full((64,), value)})


def weights_manifest(payload: bytes, *, version: int = 0, incarnation: str = INCARNATION) -> Any:
    return manifest_of(payload, policy_version=version, incarnation=incarnation)


def quick_retries() -> Retries:
    """Retries that pause for a moment only, whatever they should."""
    return Retries(pause=lambda _: asyncio.sleep(0.001))


class ManualTime:
    """Waits on a clock that a test turns: who waits goes on when it is turned far enough."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleepers.append((self._clock() + seconds, woken))
        await woken.wait()

    def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)
        for due_s, woken in self._sleepers:
            if due_s <= self._clock():
                woken.set()


class FakeEngine:
    """Answers every request with the token 5 and the end; or fails; or waits for its gate.

    What is cut at the gate has the token 5.
    """

    def __init__(self) -> None:
        self.end_token_ids = frozenset({1})
        self.policy_version: int | None = None
        self.swapped: list[int] = []
        self.failures: list[EngineError] = []
        """Raised by the next calls, one each."""
        self.heeds_cuts = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.label_offset = 0
        self.quick = 0
        """So many of the next requests find the gate open."""
        self.requests: list[GenerationRequest] = []
        self.sampling = 0

    async def generate(
        self, request: GenerationRequest, *, cut: asyncio.Event | None = None
    ) -> Generation:
        if self.failures:
            raise self.failures.pop()
        self.requests.append(request)
        self.sampling += 1
        version = (self.policy_version or 0) + self.label_offset
        span = VersionSpan(policy_version=version, num_tokens=1)
        begun = request.begun or PartialResponse(
            token_ids=(5,), logprobs=(-0.5,), version_spans=(span,)
        )
        try:
            unheeded = cut is None or not self.heeds_cuts
            if not await self._passes_gate(asyncio.Event() if unheeded else cut):
                raise GenerationCutError(begun)
        finally:
            self.sampling -= 1
        return Generation(
            token_ids=(*begun.token_ids, 1),
            logprobs=(*begun.logprobs, -0.25),
            version_spans=(*begun.version_spans, span),
            finish_reason=FinishReason.STOP,
        )

    async def _passes_gate(self, cut: asyncio.Event) -> bool:
        """Whether it got through the gate before it was cut."""
        if self.quick > 0:
            self.quick -= 1
            return True
        waits = [asyncio.create_task(event.wait()) for event in (self.gate, cut)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self.gate.is_set()

    async def swap_weights(self, weights: PolicyWeights) -> int:
        self.policy_version = weights.policy_version
        self.swapped.append(weights.policy_version)
        return self.sampling

    async def close(self) -> None:
        self.gate.set()


class FakeEnvironment:
    """Prompts say their split and index; every answer is worth the same."""

    def __init__(self) -> None:
        self.reward_of: Callable[[], float] = lambda: 0.75

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(text=f"{split} {index}", answer="")

    def reward(self, prompt: Prompt, response: str) -> float:
        return self.reward_of()


class FakeCodec:
    def encode(self, text: str) -> tuple[int, ...]:
        return (3, 4)

    def encode_reply(
        self, text: str, last_token_id: int, end_token_ids: frozenset[int]
    ) -> tuple[int, ...]:
        return (7,)

    def decode(self, token_ids: Any, end_token_ids: frozenset[int]) -> str:
        return str(token_ids)


@dataclass
class Place:
    """A learner's services, and the worker that a test has at them."""

    spec: VCPORunSpec
    desk: Desk
    store: PolicyStore
    channel: grpc.aio.Channel
    engine: FakeEngine = field(default_factory=FakeEngine)
    environment: FakeEnvironment = field(default_factory=FakeEnvironment)
    codec: FakeCodec = field(default_factory=FakeCodec)
    metrics: RolloutMetrics = field(default_factory=lambda: RolloutMetrics(run="run", group="main"))

    def publish(self, version: int) -> None:
        self.desk.dispatcher.policy_version = version
        self.store.publish(self.store.prepare(version, weights_payload(float(version))))
        self.desk.dispatcher.notify()

    def learner(self) -> Learner:
        return self.learner_for("w")

    def learner_for(self, worker_id: str) -> Learner:
        return Learner(
            self.channel, worker_id=worker_id, rollout_group="main", retries=quick_retries()
        )

    def worker(
        self,
        *,
        places: int = 4,
        drain_s: float = PATIENCE_S,
        learner: Any = None,
        time: ManualTime | None = None,
        environment_timeout_s: float | None = None,
    ) -> Worker:
        gauges = RolloutGauges(self.metrics)
        learner = learner or self.learner()
        return Worker(
            WorkerParts(
                learner=learner,
                receiver=WeightReceiver(learner=learner, engine=self.engine, gauges=gauges),
                engine=self.engine,
                environment=self.environment,
                codec=self.codec,
                gauges=gauges,
                max_concurrent_sequences=places,
                sequences_per_prompt=self.spec.batch.sequences_per_prompt,
                follows_recalls=self.spec.batch.over_provision_ratio > 1.0,
                drain_s=drain_s,
                environment_timeout_s=environment_timeout_s,
                sleep=asyncio.sleep if time is None else time.sleep,
            )
        )

    def samples(self, outcome: str) -> float:
        return self.count("vcpo_rollout_samples_total", outcome=outcome)

    def count(self, name: str, **labels: str) -> float:
        labels = {"run": "run", "group": "main", **labels}
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def served(*adders: Callable[[Any], None]) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server with these services."""
    server = WireServer(token=None)
    for add in adders:
        add(server.grpc_server)
    port = await server.start("127.0.0.1:0", ())
    channel = open_channel(f"127.0.0.1:{port}", token=None)
    try:
        yield channel
    finally:
        await channel.close()
        await server.stop(0)


@asynccontextmanager
async def a_learner(**sections: Any) -> AsyncIterator[Place]:
    """A learner for the run of `make_run(**sections)`, with nothing published."""
    desk = make_desk(**sections)
    store = PolicyStore(incarnation=INCARNATION, clock=desk.clock)
    spec = make_run(**sections).spec
    work = WorkService(desk.dispatcher, spec)
    async with served(
        lambda server: work_pb2_grpc.add_WorkServiceServicer_to_server(work, server),
        lambda server: policy_pb2_grpc.add_PolicyServiceServicer_to_server(
            PolicyService(store, PeerAssignment(desk.clock)), server
        ),
    ) as channel:
        yield Place(spec=spec, desk=desk, store=store, channel=channel)


@asynccontextmanager
async def working(worker: Worker) -> AsyncIterator[asyncio.Task[RunPhase]]:
    """The worker's task; whoever is still at work at the end is sent home."""
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, EngineError):
            await task
