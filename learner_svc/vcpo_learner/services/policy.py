"""`PolicyService`: what the newest policy is, and its bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from vcpo.wire.checks import check_id, check_wait
from vcpo.wire.errors import InvalidMessageError
from vcpo.wire.limits import CHUNK_BYTES
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo_learner.policies import PolicyStore


class PolicyService(policy_pb2_grpc.PolicyServiceServicer):
    """Serves the policy store."""

    def __init__(self, store: PolicyStore) -> None:
        self._store = store

    async def GetManifest(  # noqa: N802 - named by the contract
        self, request: policy_pb2.GetManifestRequest, context: Any
    ) -> policy_pb2.PolicyManifest:
        """Describe the newest version, waiting for one that the caller does not hold."""
        check_id("worker_id", request.worker_id)
        holds_one = request.HasField("held_policy_version")
        policy = await self._store.newest(
            held_incarnation=request.held_incarnation,
            held_version=request.held_policy_version if holds_one else None,
            wait_s=check_wait("wait_seconds", request.wait_seconds),
        )
        return policy.manifest

    async def Fetch(  # noqa: N802 - named by the contract
        self, request: policy_pb2.FetchRequest, context: Any
    ) -> AsyncIterator[policy_pb2.PolicyChunk]:
        """Stream a version's bytes from an offset."""
        check_id("worker_id", request.worker_id)
        payload = self._store.get(request.incarnation, request.policy_version).payload
        if request.offset >= len(payload):
            raise InvalidMessageError("offset", request.offset, f"less than {len(payload)}")
        for offset in range(request.offset, len(payload), CHUNK_BYTES):
            yield policy_pb2.PolicyChunk(
                policy_version=request.policy_version,
                offset=offset,
                data=payload[offset : offset + CHUNK_BYTES],
            )
