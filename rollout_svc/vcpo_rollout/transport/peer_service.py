"""The worker's `PolicyService`: it serves the weights it holds to other workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from vcpo.wire.checks import check_id
from vcpo.wire.errors import InvalidMessageError, NotFoundError
from vcpo.wire.limits import CHUNK_BYTES
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc
from vcpo_rollout.transport.transfer_buffer import TransferCache, TransferKey

_WAIT_S = 2.0
"""How long a request waits for a version that the requesting worker learned of earlier."""


class PeerService(policy_pb2_grpc.PolicyServiceServicer):
    """Serves the transfers of a cache."""

    def __init__(self, cache: TransferCache, *, wait_s: float = _WAIT_S) -> None:
        self._cache = cache
        self._wait_s = wait_s

    async def GetManifest(  # noqa: N802 - named by the contract
        self, request: policy_pb2.GetManifestRequest, context: Any
    ) -> policy_pb2.PolicyManifest:
        """Refuse: only the learner describes versions."""
        raise NotFoundError("policy: a worker has no manifests; ask the learner")

    async def Fetch(  # noqa: N802 - named by the contract
        self, request: policy_pb2.FetchRequest, context: Any
    ) -> AsyncIterator[policy_pb2.PolicyChunk]:
        """Stream a full set or a delta of a shard from an offset, while it arrives.

        A full set may be patched meanwhile; each chunk says up to which version.
        """
        check_id("worker_id", request.worker_id)
        is_delta = request.HasField("base_policy_version")
        key = TransferKey(
            incarnation=request.incarnation,
            policy_version=request.policy_version,
            base_policy_version=request.base_policy_version if is_delta else None,
            shard=request.shard,
        )
        transfer = await self._cache.find(key, self._wait_s)
        offset = request.offset
        if offset >= transfer.total_bytes:
            raise InvalidMessageError("offset", offset, f"less than {transfer.total_bytes}")
        while offset < transfer.total_bytes:
            data, newest_version = await transfer.read(offset, CHUNK_BYTES)
            yield policy_pb2.PolicyChunk(policy_version=newest_version, offset=offset, data=data)
            offset += len(data)
