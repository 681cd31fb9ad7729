"""`PolicyService`: what the newest policy is, how to get it, and its bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from vcpo.wire.checks import check_id, check_wait
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.limits import CHUNK_BYTES
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo_learner.weights.archive import ArchiveWriter
from vcpo_learner.weights.peer_assignment import PeerAssignment, serving_address
from vcpo_learner.weights.store import PolicyStore, PublishedPolicy

_MAX_PORT = 65_535


class PolicyService(policy_pb2_grpc.PolicyServiceServicer):
    """Serves the policy store, and sends those who ask to each other."""

    def __init__(
        self, store: PolicyStore, peers: PeerAssignment, archive_writer: ArchiveWriter | None = None
    ) -> None:
        self._store = store
        self._peers = peers
        self._archivist = archive_writer

    async def GetManifest(  # noqa: N802 - named by the contract
        self, request: policy_pb2.GetManifestRequest, context: Any
    ) -> policy_pb2.PolicyManifest:
        """Describe the newest version, waiting for one that the caller does not hold."""
        check_id("worker_id", request.worker_id)
        if request.serving_port > _MAX_PORT:
            raise InvalidMessageError("serving_port", request.serving_port, f"0 to {_MAX_PORT}")
        address = serving_address(context.peer(), request.serving_port)
        self._peers.register(request.worker_id, address, self._held_version(request))
        holds_one = request.HasField("held_policy_version")
        policy = await self._store.wait_for_newest(
            held_incarnation=request.held_incarnation,
            held_version=request.held_policy_version if holds_one else None,
            wait_s=check_wait("wait_seconds", request.wait_seconds),
        )
        return self._answer(request, policy)

    async def Fetch(  # noqa: N802 - named by the contract
        self, request: policy_pb2.FetchRequest, context: Any
    ) -> AsyncIterator[policy_pb2.PolicyChunk]:
        """Stream a full set or a delta from an offset."""
        check_id("worker_id", request.worker_id)
        data = self._asked_for(request)
        if request.offset >= len(data):
            raise InvalidMessageError("offset", request.offset, f"less than {len(data)}")
        for offset in range(request.offset, len(data), CHUNK_BYTES):
            yield policy_pb2.PolicyChunk(
                policy_version=request.policy_version,
                offset=offset,
                data=data[offset : offset + CHUNK_BYTES],
            )

    def _answer(
        self, request: policy_pb2.GetManifestRequest, policy: PublishedPolicy
    ) -> policy_pb2.PolicyManifest:
        """A version's manifest with the caller's way to it."""
        newest = policy.manifest.policy_version
        held = self._held_version(request)
        if held == newest:
            return policy.manifest
        deltas = [] if held is None else self._store.deltas_from(request.held_incarnation, held)
        answer = policy_pb2.PolicyManifest()
        answer.CopyFrom(policy.manifest)
        answer.deltas.extend(delta.entry for delta in deltas)
        archived = self._archivist.archived if self._archivist else None
        again = self._peers.is_assigned(request.worker_id, newest)
        if archived is not None and archived.policy_version == newest and not (deltas or again):
            answer.archived.CopyFrom(archived)
        base_version = held if deltas else None
        answer.peer = self._peers.assign(
            request.worker_id, policy_version=newest, base_version=base_version
        )
        if answer.peer:
            others = self._peers.fallbacks(request.worker_id, base_version=base_version)
            answer.other_peers.extend(one for one in others if one != answer.peer)
        return answer

    def _held_version(self, request: policy_pb2.GetManifestRequest) -> int | None:
        """The version that the caller holds of this learner's incarnation."""
        if not request.HasField("held_policy_version"):
            return None
        same = request.held_incarnation == self._store.incarnation
        return request.held_policy_version if same else None

    def _asked_for(self, request: policy_pb2.FetchRequest) -> bytes:
        incarnation, version = request.incarnation, request.policy_version
        if request.HasField("base_policy_version"):
            return self._store.get_delta(incarnation, version, request.base_policy_version).data
        return self._store.get(incarnation, version).payload
