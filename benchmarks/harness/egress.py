"""Measure what a learner sends so that N workers get a version: real servers, in one process.

Each of N receivers has its own server and forwards what it receives, as a worker does. All request
at once: first a full set, then the delta to the next version. What the learner sends for both is
given in multiples of what one receiver gets: `full` and `delta`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import safetensors.torch
import torch

from benchmarks.harness.changes import prepare
from vcpo.metrics import RolloutMetrics
from vcpo.wire.client import open_channel
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo.wire.weights import Payload
from vcpo_learner.ledger.worker_registry import WorkerRegistry
from vcpo_learner.services.policy import PolicyService
from vcpo_learner.weights.peer_assignment import PeerAssignment
from vcpo_learner.weights.store import PolicyStore
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.transport.learner_client import HeldPolicy, LearnerClient
from vcpo_rollout.transport.peer_client import PeerClient
from vcpo_rollout.transport.peer_service import PeerService
from vcpo_rollout.transport.transfer_buffer import TransferCache
from vcpo_rollout.weights.fetcher import WeightFetcher

_INCARNATION = "benchmark"
_ANY_PORT = "127.0.0.1:0"
_CHANGED_SHARE = 0.01
_open_channel = partial(open_channel, key=None)


class CountingService(PolicyService):
    """The learner's service; counts the bytes of weights that it sends."""

    num_bytes = 0

    async def Fetch(  # noqa: N802 - named by the contract
        self, request: policy_pb2.FetchRequest, context: Any
    ) -> AsyncIterator[policy_pb2.PolicyChunk]:
        """Stream as the service does."""
        async for chunk in super().Fetch(request, context):
            self.num_bytes += len(chunk.data)
            yield chunk


@dataclass(kw_only=True)
class Receiver:
    """The weight transfer of a worker."""

    learner: LearnerClient
    fetcher: WeightFetcher
    held: HeldPolicy | None = None

    async def take(self) -> Payload:
        """Fetch the newest version and announce it."""
        manifest = await self.learner.newest_policy(self.held, wait_s=0)
        weights = await self.fetcher.fetch(manifest)
        assert weights is not None, "the version was retired"
        self.held = HeldPolicy(incarnation=_INCARNATION, policy_version=weights.policy_version)
        return weights.shards[0].payload


async def egress(num_receivers: int, *, size_bytes: int) -> dict[str, float]:
    """Return what the learner sends to `num_receivers`, in multiples of what one of them gets."""
    store = PolicyStore(incarnation=_INCARNATION, clock=time.monotonic)
    service = CountingService(store, PeerAssignment(WorkerRegistry(time.monotonic)))
    payloads = two_payloads(size_bytes)
    async with AsyncExitStack() as stack:
        channel = await _connect(stack, service)
        receivers = [
            await _receiver(stack, channel, f"worker-{number}") for number in range(num_receivers)
        ]
        sent: list[int] = []
        for version, payload in enumerate(payloads):
            store.publish(prepare(store, version, payload))
            before = service.num_bytes
            taken = await asyncio.gather(*(receiver.take() for receiver in receivers))
            assert all(one == payload for one in taken), "a receiver holds other bytes"
            sent.append(service.num_bytes - before)
        delta_bytes = store.get_delta(_INCARNATION, 1, 0).file.size_bytes
    return {"full": sent[0] / len(payloads[0]), "delta": sent[1] / delta_bytes}


def two_payloads(size_bytes: int) -> list[bytes]:
    """Return two versions of one bfloat16 tensor; a hundredth of the values differ."""
    torch.manual_seed(0)
    weight = torch.randn(size_bytes // 2).bfloat16()
    changed = weight.clone()
    changed[torch.rand(weight.shape) < _CHANGED_SHARE] += 1.0
    return [safetensors.torch.save({"weight": one}) for one in (weight, changed)]


async def _connect(
    stack: AsyncExitStack, service: policy_pb2_grpc.PolicyServiceServicer
) -> grpc.aio.Channel:
    """Return a channel to a new server."""
    return await stack.enter_async_context(
        _open_channel(f"127.0.0.1:{await _port(stack, service)}")
    )


async def _port(stack: AsyncExitStack, service: policy_pb2_grpc.PolicyServiceServicer) -> int:
    server = WireServer(keys=None)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(service, server.grpc_server)
    port = await server.start(_ANY_PORT, ())
    stack.push_async_callback(server.stop, 0)
    return port


async def _receiver(stack: AsyncExitStack, channel: grpc.aio.Channel, name: str) -> Receiver:
    cache = TransferCache()
    port = await _port(stack, PeerService(cache))
    learner = LearnerClient(channel, worker_id=name, rollout_group="main", serving_port=port)
    gauges = RolloutGauges(RolloutMetrics(run="benchmark", group="main"))
    peers = PeerClient(_open_channel, worker_id=name, gauges=gauges, window_s=60.0)
    return Receiver(
        learner=learner, fetcher=WeightFetcher(learner, gauges, cache=cache, peers=peers)
    )
