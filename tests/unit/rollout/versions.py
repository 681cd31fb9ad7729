"""Versions of one set of weights of which little changes, and a learner that serves them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch

from tests.unit.learner.scenes import INCARNATION, ManualClock
from vcpo.wire.errors import UnavailableError
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo_learner.services.policy import PolicyService
from vcpo_learner.weights.archive import ArchiveWriter
from vcpo_learner.weights.peer_assignment import PeerAssignment
from vcpo_learner.weights.store import PolicyStore

NUM_ELEMENTS = 2000


def payload_of(version: int) -> bytes:
    """Version n: element i of 2,000 is 1, but the first n are -0.0."""
    weight = torch.ones(NUM_ELEMENTS, dtype=torch.bfloat16)
    weight[:version] = -0.0
    return safetensors.torch.save({"layer.weight": weight.reshape(20, 100)})


def store_of(*versions: int) -> PolicyStore:
    """A store in which these were published, one after the other."""
    store = PolicyStore(incarnation=INCARNATION, clock=ManualClock())
    publish(store, *versions)
    return store


def publish(store: PolicyStore, *versions: int) -> None:
    for version in versions:
        store.publish(store.prepare(version, payload_of(version)))


class TroubledService(policy_pb2_grpc.PolicyServiceServicer):
    """A learner's service, whose transfers meet what `troubles` says.

    They are given what they would send, from their offset on, and return what is sent before the
    connection breaks; None, and it does not break.
    """

    def __init__(self, store: PolicyStore, archive_writer: ArchiveWriter | None = None) -> None:
        self._service = PolicyService(store, PeerAssignment(ManualClock()), archive_writer)
        self.troubles: list[Callable[[bytes], bytes | None]] = []
        self.fetches: list[policy_pb2.FetchRequest] = []
        self.num_bytes = 0

    async def GetManifest(self, request: Any, context: Any) -> Any:  # noqa: N802 - the contract's
        return await self._service.GetManifest(request, context)

    async def Fetch(self, request: Any, context: Any) -> Any:  # noqa: N802 - the contract's
        self.fetches.append(request)
        chunks = [chunk.data async for chunk in self._service.Fetch(request, context)]
        data = b"".join(chunks)
        sent = self.troubles.pop(0)(data) if self.troubles else None
        self.num_bytes += len(data if sent is None else sent)
        yield policy_pb2.PolicyChunk(offset=request.offset, data=data if sent is None else sent)
        if sent is not None and len(sent) < len(data):
            await asyncio.sleep(0)
            raise UnavailableError("the connection is gone")


def flipped(place: int, bit: int) -> Callable[[bytes], bytes]:
    """A trouble: one bit of what is sent is another."""

    def flip(data: bytes) -> bytes:
        at = place % len(data)
        return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]

    return flip
